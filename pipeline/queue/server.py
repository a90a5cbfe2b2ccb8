"""The queue server's process: `python -m pipeline.queue.server RUN_FOLDER ATTEMPT [--port P] [--parent PID]`.

It lives exactly as long as its parent, the controller, and ends by SIGKILL: what it acknowledged is durable at any
moment, so it ignores the signals that reach a whole process group. Once it serves, `secrets/queue-<attempt>.json`
says where. A restarted server (same attempt, same port) goes on from what is committed. Where the disk is full it ends
with a code of its own and answers nothing more: what was not acknowledged is not in the queue.
"""

import argparse
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.core.errors import Fenced, QueueDamaged
from pipeline.disk import EXIT_FULL, is_full_error
from pipeline.processes import die_with_parent, say
from pipeline.run_folder import RunFolder, read_json, write_json

if TYPE_CHECKING:
    from pipeline.queue.index import Index

INDEX_WAIT_S = 10.0  # for an older server to go; one whose controller died is gone within milliseconds
INDEX_POLL_S = 0.05


def main() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="pipeline.queue.server")
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("attempt", type=int)
    parser.add_argument("--host", default="127.0.0.1", help="the address that it serves on, and is reached at")
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument("--parent", type=int, default=os.getppid(), help="the process to die with")
    args = parser.parse_args()
    die_with_parent(signal.SIGKILL, args.parent)
    os.umask(0o077)
    try:
        serve(RunFolder(args.run_folder), args.attempt, args.port, args.host)
    except Exception as error:
        if not is_full_error(error):
            raise
        say(f"queue server: {error}")
        sys.exit(EXIT_FULL)


def serve(run: RunFolder, attempt: int, port: int, host: str = "127.0.0.1", index_wait_s: float = INDEX_WAIT_S) -> None:
    """Serve until killed. Ends with a message that names the holder if another server keeps the index."""
    # Imported here: pyarrow takes 0.3 s, in which a signal would still end us.
    from pipeline.queue.segments import SegmentFiles
    from pipeline.queue.service import QueueService

    secret = (run.secrets / "queue.key").read_bytes()
    if not (run.queue / "index.db").exists() and any((run.queue / "segments").glob("*.arrows")):
        raise QueueDamaged(f"{run.queue}/index.db is missing, which says what the files in segments/ hold")
    index = _take_index(run, attempt, index_wait_s)
    files = SegmentFiles(run.queue / "segments", f"{attempt:04d}-{os.getpid()}.arrows")
    service = QueueService(f"grpc://{host}:{port}", secret, attempt, index, files)
    place = {"endpoint": f"grpc://{host}:{service.port}", "pid": os.getpid()}
    write_json(run.secrets / f"queue-{attempt}.json", {**place, "host": socket.gethostname(), "attempt": attempt})
    service.serve()


def _take_index(run: RunFolder, attempt: int, wait_s: float) -> "Index":
    from pipeline.queue.index import Index

    deadline = time.monotonic() + wait_s
    is_told = False
    while True:
        try:
            return Index(run.queue / "index.db", attempt)
        except Fenced as error:
            sys.exit(f"queue server: {error}")
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                sys.exit(f"queue server of attempt {attempt}: {error} since {wait_s:g} s: {_holder(run)}")
            if not is_told:
                print(f"queue server of attempt {attempt} waits {wait_s:g} s: {error}: {_holder(run)}", file=sys.stderr)
                is_told = True
        time.sleep(INDEX_POLL_S)


def _holder(run: RunFolder) -> str:
    """Who served last, by the newest endpoint file."""
    files = sorted(run.secrets.glob("queue-*.json"), key=lambda path: path.stat().st_mtime)
    if not files:
        return "the holder has not said who it is"
    last = read_json(files[-1])
    return f"the queue server of attempt {last['attempt']}, pid {last['pid']} on host {last['host']}, has it"


if __name__ == "__main__":
    main()
