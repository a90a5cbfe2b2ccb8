"""The entry point. Nothing that takes time is imported before a Ctrl-C can be taken."""

import contextlib
import os
import sys
from collections.abc import Sequence

_PYTHON = (3, 11)
_USER_FAULT, _CANCELLED = 2, 130


def run(arguments: Sequence[str]) -> int:
    """Do what the arguments say; return the exit code."""
    if sys.version_info[:2] != _PYTHON:
        have, need = (".".join(map(str, version)) for version in (sys.version_info[:2], _PYTHON))
        print(
            f"Error: this is Python {have}, and pivot-pipeline needs {need}: python{need} -m venv .venv",
            file=sys.stderr,
        )
        return _USER_FAULT
    try:
        from pipeline.cli import commands

        return commands.run(arguments)
    except KeyboardInterrupt:
        return _CANCELLED


def main() -> None:
    os.umask(0o077)  # a run is its user's alone, also what libraries write into it, such as MLflow's database
    code = run(sys.argv[1:])
    if code == _CANCELLED:
        # An interrupt that was raised inside `exec` (every dataclass has one) stays marked as unhandled in CPython,
        # though it was handled: the interpreter would end by SIGINT instead of with this code.
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
