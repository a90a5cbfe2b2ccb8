"""Several ranks under one hand: rank 0 is this process, each other one a process of its own that does the same."""

import contextlib
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState

from pipeline.config import Config
from pipeline.gps.store import Reader, Store
from pipeline.queue.schema import SequenceRow
from pipeline.wire_shift import Probe
from stages.rl.ranks import Ranks, join
from stages.rl.trainer import HfTrainer
from stages.start import announce

T = TypeVar("T")
_LIMIT_S = 30.0


class Crew:
    """A group that trainers can be made on, one after the other."""

    def __init__(self, ranks: Ranks, others: Sequence[Connection]) -> None:
        self.ranks = ranks
        self._others = others
        self._num_trainers = 0

    def make(self, config: Config, reader: Reader | None = None) -> "RankedTrainer":
        if reader is not None and reader.version != 0:
            raise ValueError(f"a trainer starts from version 0 or a checkpoint, not from version {reader.version}")
        self._num_trainers += 1
        self.tell(self._num_trainers, "make", config)
        own = HfTrainer(config, reader, self.ranks)
        self.hear()
        return RankedTrainer(self, self._num_trainers, own)

    def tell(self, *message: Any) -> None:
        for other in self._others:
            other.send(message)

    def hear(self) -> list[tuple[str, Any]]:
        """("returned", value) or ("raised", what) of each other rank."""
        for other in self._others:
            assert other.poll(_LIMIT_S), "a rank does not answer"
        return [other.recv() for other in self._others]


class RankedTrainer:
    """A stages.rl.base.Trainer: what is done to it is done to every rank, and all must say the same."""

    def __init__(self, crew: Crew, number: int, own: HfTrainer) -> None:
        self.own = own
        self._crew = crew
        self._number = number

    @property
    def version(self) -> int:
        return self.own.version

    def train(self, rows: list[SequenceRow], step: int) -> dict[str, float]:
        metrics: dict[str, float] = self._all("train", rows, step)
        return metrics

    def probe(self) -> Probe:
        probe: Probe = self._all("probe")
        return probe

    def publish(self, store: Store, limit_s: float) -> None:
        self._all("publish", store, limit_s)

    def save(self, uri: str) -> str:
        path: str = self._all("save", uri)
        return path

    def load(self, path: str) -> None:
        self._all("load", path)

    def sleep(self) -> None:
        self._all("sleep")

    def wake(self) -> None:
        self._all("wake")

    def on_each(self, call: Callable[..., T], *args: Any) -> T:
        """call(trainer, *args) on every rank: what rank 0's gave. `call` is a function of a module."""
        self._crew.tell(self._number, call, *args)
        mine = call(self.own, *args)
        assert all(kind == "returned" for kind, _ in self._crew.hear())
        return mine

    def _all(self, method: str, *args: Any) -> Any:
        self._crew.tell(self._number, method, *args)
        mine = _outcome(self.own, method, args)
        found = [mine, *self._crew.hear()]
        assert all(repr(other) == repr(mine) for other in found), f"ranks differ in {method}: {found}"
        if mine[0] == "raised":
            raise mine[1]
        return mine[1]


@contextmanager
def crew(num_ranks: int) -> Iterator[Crew]:
    """Leaves nothing behind in this process: neither a group nor what accelerate knows of one."""
    while len(_processes) < num_ranks - 1:
        _processes.append(_Process())
    others = [process.end for process in _processes[: num_ranks - 1]]
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = Path(folder) / "group"
        for rank, other in enumerate(others, start=1):
            other.send((0, "join", rendezvous, rank, num_ranks))
        with _member(rendezvous, 0, num_ranks) as ranks:
            made = Crew(ranks, others)
            made.hear()
            yield made
            made.tell(0, "leave")
        made.hear()


@contextmanager
def beside(call: Callable[..., Any], *args: Any) -> Iterator[None]:
    """call(*args), a function of a module, in another process meanwhile. Raises what it raised."""
    if not _processes:
        _processes.append(_Process())
    end = _processes[0].end
    end.send((0, call, *args))
    yield
    assert end.poll(_LIMIT_S), "the other process does not answer"
    kind, value = end.recv()
    if kind == "raised":
        raise value


def started(call: Callable[..., Any], *args: Any) -> multiprocessing.process.BaseProcess:
    """A process, forked from one that has imported torch once for all."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([__name__])
    process = server.Process(target=call, args=args, daemon=True)
    process.start()
    return process


class _Process:
    """One for all groups of a session."""

    def __init__(self) -> None:
        self.end, its = multiprocessing.Pipe()
        started(_serve, its)
        its.close()


_processes: list[_Process] = []


@contextmanager
def leaving() -> Iterator[None]:
    """Whoever joins a group in here has left it afterwards: neither torch nor accelerate know of it."""
    kept = dict(os.environ)
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        AcceleratorState._reset_state(reset_partial_state=True)
        os.environ.clear()
        os.environ.update(kept)


@contextmanager
def _member(rendezvous: Path, rank: int, num_ranks: int) -> Iterator[Ranks]:
    with leaving():
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        announce(rank, num_ranks, 0)
        yield join(rendezvous, rank, num_ranks, _LIMIT_S)


def _outcome(trainer: Any, method: str | Callable[..., Any], args: Sequence[Any]) -> tuple[str, Any]:
    try:
        if callable(method):
            method(trainer, *args)
            return "returned", None
        return "returned", getattr(trainer, method)(*args)
    except Exception as error:
        return "raised", error


def _serve(end: Connection) -> None:
    """Until the test process has closed its end."""
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError):
        while True:
            _, what, *args = end.recv()
            if callable(what):
                end.send(_outcome(None, lambda _, call=what, args=args: call(*args), ()))
                continue
            with _member(*args) as ranks:
                end.send(("returned", None))
                _follow(end, ranks)
            end.send(("returned", None))


def _follow(end: Connection, ranks: Ranks) -> None:
    trainers: dict[int, HfTrainer] = {}
    while True:
        number, method, *args = end.recv()
        if method == "leave":
            return
        if method == "make":
            trainers[number] = HfTrainer(args[0], None, ranks)
            end.send(("returned", None))
        else:
            end.send(_outcome(trainers[number], method, args))
