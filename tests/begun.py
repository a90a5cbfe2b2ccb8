"""Command lines that a test begins: none outlives its test, also where an assertion fails while it still runs."""

import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

_END_S = 20.0
_begun: list["subprocess.Popen[str]"] = []


def begin_command(command: Sequence[str], env: Mapping[str, str], folder: Path | None) -> "subprocess.Popen[str]":
    """What it prints comes through one pipe. In a thread of its own it belongs to a fixture of several tests, which
    waits for it."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if threading.current_thread() is threading.main_thread():
        _begun.append(process)
    return process


def end_what_was_begun() -> None:
    while _begun:
        process = _begun.pop()
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        assert process.stdout is not None
        process.stdout.close()
