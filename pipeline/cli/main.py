"""The entry point. Nothing that takes time is imported before a Ctrl-C can be taken."""

import os
import sys
from collections.abc import Sequence

_CANCELLED = 130


def run(arguments: Sequence[str]) -> int:
    """Do what the arguments say; return the exit code."""
    try:
        from pipeline.cli import commands

        return commands.run(arguments)
    except KeyboardInterrupt:
        return _CANCELLED


def main() -> None:
    os.umask(0o077)  # a run is its user's alone, also what libraries write into it, such as MLflow's database
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
