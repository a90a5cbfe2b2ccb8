"""The ranks of an engine that has several: processes forked by the worker, each with its part of the model, on a slot
each. They are vLLM's own, with what a run asks of its processes:

  * They die with the worker, from their first instruction on, and the worker with any of them: an engine without one of
    its ranks is a dead engine. What reaches whole process groups does not reach them.
  * What they share with each other has a name only while the engine starts, one that begins as its starter says; then
    nothing of it is left behind, whatever kills them.
"""

import multiprocessing
import os
import secrets
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker, shared_memory
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from vllm.distributed.device_communicators import shm_broadcast
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import multiproc_executor
from vllm.v1.worker.worker_base import WorkerBase

from pipeline.gps.files import SHM
from pipeline.pickles import travels
from pipeline.processes import STOPPING, describe_exit, die_with_parent
from stages.engines.counters import Costly, so_far

T = TypeVar("T")
_VllmRank = multiproc_executor.WorkerProc
_BURIED_S = 5.0
_on_signal: dict[signal.Signals, Any] = {}
"""In a rank: what was to be done when it began."""


class Rank(_VllmRank):
    """In its own process."""

    @staticmethod
    def worker_main(*args: Any, **more: Any) -> None:
        worker = multiprocessing.parent_process()
        assert worker is not None and worker.pid is not None
        die_with_parent(signal.SIGKILL, worker.pid)
        _on_signal.update({stopping: signal.getsignal(stopping) for stopping in STOPPING})
        _VllmRank.worker_main(*args, **more)

    def __init__(self, *args: Any, **more: Any) -> None:
        for stopping, handler in _on_signal.items():
            signal.signal(stopping, handler)  # as in the worker: vLLM has just said that two of them end a rank
        super().__init__(*args, **more)


class Ranks(multiproc_executor.MultiprocExecutor):
    """In the worker's process. Made inside of `sharing`."""

    def _init_executor(self) -> None:
        super()._init_executor()
        assert self.rpc_broadcast_mq is not None
        self.rpc_broadcast_mq.buffer.is_creator = False  # it has no name any more that would be removed at the end

    def start_worker_monitor(self, inline: bool = False) -> None:
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def _watch(self) -> None:
        """Waits for the end of any rank, which is that of this process; ends with it."""
        ranks = {handle.proc.sentinel: handle for handle in self.workers}
        ended = next(handle for sentinel, handle in ranks.items() if sentinel in connection.wait(list(ranks)))
        if not getattr(self, "shutting_down", False):
            ended.proc.join(_BURIED_S)  # its files were closed, which is a little before it can be buried
            how = describe_exit(ended.proc.exitcode) if ended.proc.exitcode is not None else "does not answer"
            os.write(2, f"rank {ended.rank} of the engine, process {ended.proc.pid}: {how}\n".encode())
            os._exit(1)

    @staticmethod
    def _ensure_worker_termination(worker_procs: list[BaseProcess]) -> None:
        """At once: they have nothing to save."""
        for process in worker_procs:
            process.kill()
        for process in worker_procs:
            process.join()


@contextmanager
def sharing(prefix: str) -> Iterator[None]:
    """An engine with several ranks is started inside. While it is, what its processes share has names in /dev/shm that
    begin with `prefix`, and in a folder for temporary files of its own; afterwards it has none."""

    def name() -> str:
        return f"{prefix}{secrets.token_hex(8)}"

    try:
        with (
            tempfile.TemporaryDirectory(prefix="r") as folder,  # short: sockets are made in it
            patch.dict(os.environ, VLLM_WORKER_MULTIPROC_METHOD="fork"),  # they need what is imported here
            patch.object(multiproc_executor, "WorkerProc", Rank),
            patch.object(shm_broadcast, "get_open_zmq_ipc_path", lambda: f"ipc://{folder}/{secrets.token_hex(8)}"),
            patch.object(multiproc_executor, "get_file_store_init_method", lambda: f"file://{folder}/{name()}"),
            patch.object(shared_memory, "_make_filename", lambda: f"/{name()}"),
            patch.object(resource_tracker, "register", _leave_alone),
            patch.object(resource_tracker, "unregister", _leave_alone),
        ):
            yield
    finally:
        for left in Path(SHM).glob(f"{prefix}*"):
            left.unlink(missing_ok=True)


def _leave_alone(name: str, kind: str) -> None:
    """Python would start a process to remove it."""


# --- what the worker asks of its ranks, or of the only one, which it is itself --------------------------------------


@dataclass(frozen=True, slots=True)
class _Failed:
    error: Exception


def on_each(llm: LLMEngine, function: Callable[..., T], *args: Any) -> list[T]:
    """What `function(worker, *args)` returns on each rank. If it fails anywhere, the first error is raised when all
    have ended: vLLM's own way would leave the others' answers to be taken for those to the next question."""
    outcomes = llm.collective_rpc(_outcome, args=(function, *args))
    for rank, outcome in enumerate(outcomes):
        if isinstance(outcome, _Failed):
            if len(outcomes) > 1:
                outcome.error.add_note(f"on rank {rank} of {len(outcomes)}")
            raise outcome.error
    return outcomes  # type: ignore[no-any-return]


def costly_so_far(worker: WorkerBase) -> Costly:
    """Of a rank's process."""
    return so_far()


def _outcome(worker: WorkerBase, function: Callable[..., T], *args: Any) -> T | _Failed:
    try:
        return function(worker, *args)
    except Exception as error:
        if multiprocessing.parent_process() is None:
            return _Failed(error)
        text = traceback.format_exc()
        if not travels(error):
            error = RuntimeError(str(error))
        error.add_note(text)
        return _Failed(error)
