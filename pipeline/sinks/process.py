"""The process in which a sink of the user's lives: told by lines of JSON, each of which is answered."""

import json
import os
import signal
import socket
import sys
import traceback
from typing import Any

from pipeline.processes import die_with_parent
from pipeline.sinks.base import RunFacts, Sink
from pipeline.stage import resolve

_MOST_TEXT = 2000


def serve(sock: socket.socket, told: dict[str, Any]) -> None:
    """Ends when the sink is closed, could not be started, or who asked is gone."""

    def answer(error: str = "") -> None:
        sock.sendall(json.dumps({"error": error}).encode() + b"\n")

    try:
        sink: Sink = resolve("stages.own.code:load_function")(told["path"])()
        sink.start(RunFacts(**told["run"]))
    except BaseException:  # the user's code
        answer(_text())
        return
    answer()
    for line in sock.makefile("rb"):
        order = json.loads(line)
        try:
            if "close" in order:
                sink.close(order["close"])
            else:
                sink.log(order["step"], order["metrics"])
        except Exception:
            answer(_text())
        else:
            answer()
        if "close" in order:
            return


def _text() -> str:
    text = traceback.format_exc()
    print(text, file=sys.stderr, flush=True)
    return text[-_MOST_TEXT:].strip().splitlines()[-1]


def main(fd: int, parent: int, told: dict[str, Any]) -> None:
    die_with_parent(signal.SIGKILL, parent)
    os.set_inheritable(fd, False)
    sys.path.extend(told["code_path"])  # at the end: nothing of the user's may hide ours
    serve(socket.socket(fileno=fd), told)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
