"""The life of a worker: start, tell that it is ready, run stage tasks, die.

    main thread     makes the engine and steps it for ever; or makes the trainer and runs its tasks, one by one
    reader thread   consumes the agent's messages; end of file is the end of the worker
    task threads    one per stage task of an engine's worker

Nothing here waits for a dead part: the agent's end closes the socket, and an exception in the loop ends the process.
"""

import contextvars
import itertools
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pipeline import wire
from pipeline.config import Config, load_resolved
from pipeline.core.errors import UpdateRefused
from pipeline.core.events import Role
from pipeline.gps.elsewhere import Elsewhere
from pipeline.gps.store import Store
from pipeline.kill_points import be_worker
from pipeline.processes import beat_period_s
from pipeline.run_folder import RunFolder
from pipeline.stage import Order
from pipeline.wire_counts import Counts
from pipeline.wire_shift import Prepare, Sleep, Wake
from stages.engines.base import EngineReport, Stored
from stages.engines.host import EngineHost
from stages.engines.watchdog import Watchdog
from stages.group import with_the_others
from stages.shift import Shift, held_bytes
from stages.start import make_engine, make_trainer
from stages.task import Task, route_output

if TYPE_CHECKING:
    from pipeline.queue.client import QueueClient
    from stages.rl.base import Trainer
    from stages.text import Tokenizer

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Worker:
    """What stage functions find as `task.worker`. One of `engine` and `trainer` is there, neither if it has no slots.

    `policy` and `genrm` are this node's weights. `options` are the controller's: `queue`, the queue server's endpoint.
    `rank` counts the replicas of its role (train: the ranks of the group), `life` how often it was started; `slots` are
    those of its node that it has; `host` is the node's own address; `gps` the base name of its shared memory.
    """

    def __init__(self, order: wire.WorkerOrder) -> None:
        self.name = order.start.worker
        self.role = Role(order.start.role)
        self.rank = order.start.index
        self.life = order.start.life
        self.slots = order.start.slots
        self.node = order.node
        self.host = order.host
        self.attempt = order.attempt
        self.gps = order.gps
        self.options: dict[str, Any] = order.start.options
        self.run = RunFolder(Path(order.run))
        self.config: Config = load_resolved(self.run.config)
        self.policy = self._attached("policy")
        self.engine: EngineHost | None = None
        self.trainer: Trainer | None = None

    @cached_property
    def genrm(self) -> Store:
        """There is none where the judge has no slots."""
        return self._attached("genrm")

    def _attached(self, store: str) -> Store:
        is_dealt = self.config.num_piles > 1
        others = Elsewhere(self.gps, store, self.run.rendezvous, self.config.limits.publish_s) if is_dealt else None
        return Store.attach(f"{self.gps}-{store}", others)

    @property
    def stores(self) -> list[Store]:
        return [self.policy, self.genrm] if self.config.judge_model is not None else [self.policy]

    @cached_property
    def queue(self) -> "QueueClient":
        """Connects at the first call: gRPC's threads are born after the last fork."""
        from pipeline.queue.client import QueueClient

        secret = (self.run.secrets / "queue.key").read_bytes()
        return QueueClient(self.options["queue"], secret, self.attempt, self.config.limits.request_s)

    @property
    def version(self) -> int:
        """Of the weights that it has; asleep: that it had."""
        holder = self.engine or self.trainer
        return holder.version if holder is not None else 0

    def warm(self) -> None:
        """Have what every task needs and keeps: what it holds asleep does not grow by that later."""
        if self.engine is not None:
            from stages.text import load_tokenizer

            load_tokenizer(self.config.model.policy.path, self.config.model.trust_remote_code)
            assert self.tokenizer

    @property
    def queue_waited_s(self) -> float:
        """How long its tasks have waited for the queue so far."""
        return self.queue.waited_s if "queue" in self.__dict__ else 0.0

    @cached_property
    def tokenizer(self) -> "Tokenizer":
        """Of the role's own model."""
        from stages.text import load_tokenizer

        models, judge = self.config.model, self.config.judge_model
        model = judge if judge is not None and self.role is Role.REWARD else models.policy
        return load_tokenizer(model.path, models.trust_remote_code)


_SHIFT, _TASK = 0, 1
"""What the trainer's thread does first."""


class Service:
    """The worker at work: the agent's messages in, the worker's reports out."""

    def __init__(self, worker: Worker, sock: socket.socket) -> None:
        self._worker = worker
        self._sock = sock
        self._sending = threading.Lock()
        self._tasks: dict[str, Task] = {}
        self._for_main: queue.PriorityQueue[tuple[int, int, Callable[[], None]]] = queue.PriorityQueue()
        self._number = itertools.count()
        self.shift = Shift(worker, self._tasks, self.say, partial(self._on_main, _SHIFT))

    def say(self, message: wire.ToItsAgent) -> None:
        """From any thread."""
        with self._sending:
            self._sock.sendall(wire.encode_message(message))

    def read(self) -> NoReturn:
        """The reader thread. Never waits for anything but the agent."""
        stream = self._sock.makefile("rb")
        try:
            while head := stream.read(4):
                self._take(wire.decode_to_worker(stream.read(int.from_bytes(head, "little"))))
        except Exception:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)  # the agent is gone

    def _take(self, message: wire.ToWorker) -> None:
        match message:
            case wire.RunTask():
                self._start(Task(self._worker, message, self._say_of_task))
            case wire.LoadVersion():
                self._load(message)
            case Prepare():
                self.shift.prepare(message)
            case Sleep():
                self.shift.sleep()
            case Wake():
                self.shift.wake(message)
            case _:
                task = self._tasks.get(message.task)
                if task is None:
                    return  # it has ended; its TaskEnded is on the way and says so
                match message:
                    case wire.DispatchTask(ids=ids, turns=turns):
                        task.give(Order("dispatch", tuple(ids), tuple(turns)))
                    case wire.AbortTask(ids=ids):
                        task.give(Order("abort", tuple(ids)))
                    case wire.EndTask():
                        task.end()

    def _start(self, task: Task) -> None:
        self._tasks[task.id] = task
        if self._worker.trainer is not None:
            self._on_main(_TASK, partial(self._run, task))
        else:
            threading.Thread(target=self._run, args=(task,), name=task.id, daemon=True).start()

    def _run(self, task: Task) -> None:
        contextvars.copy_context().run(task.run)
        del self._tasks[task.id]
        self.shift.go_on()

    def _say_of_task(self, message: wire.FromWorker) -> None:
        self.say(message)
        if isinstance(message, wire.TaskStarted):
            self.shift.go_on()

    def _on_main(self, order: int, work: Callable[[], None]) -> None:
        self._for_main.put((order, next(self._number), work))

    def run_tasks(self) -> NoReturn:
        """The main thread of a trainer's worker: torch stays on the thread that made the model. A shift waits for the
        task that runs, not for those that wait: it is a checkpoint, and the others can be made asleep as well."""
        while True:
            _, _, work = self._for_main.get()
            work()

    def live(self, period_s: float) -> NoReturn:
        """A thread that says that this process is not stopped, and that nothing holds it as a whole."""
        while True:
            self.say(wire.Alive(worker=self._worker.name))
            time.sleep(period_s)

    def report_counts(self, report: EngineReport) -> None:
        self.say(Counts(worker=self._worker.name, rss_bytes=rss_bytes(), **asdict(report)))

    def _load(self, message: wire.LoadVersion) -> None:
        """A failed update is an event: the controller decides what becomes of the worker."""
        worker, version, started = self._worker, message.version, time.monotonic()

        def end(error: Exception | None) -> None:
            if error is None:
                took_s, size = time.monotonic() - started, worker.policy.gigabytes
                self.say(wire.VersionLoaded(worker=worker.name, version=version, seconds=took_s, gigabytes=size))
                return
            is_refusal = isinstance(error, UpdateRefused)
            reason = str(error) if is_refusal else "".join(traceback.format_exception(error))
            print(f"version {version} was not loaded: {reason}")
            self.say(wire.UpdateFailed(worker=worker.name, version=version, reason=reason))

        assert worker.engine is not None
        worker.engine.load(
            Stored(store=worker.policy, version=version, wait_s=worker.config.limits.publish_s),
            message.probe,
            keep_kv=message.keep_kv,
            on_end=end,
        )


def main(sock: socket.socket, order: wire.WorkerOrder) -> NoReturn:
    """Called in a fresh fork of the zygote, on its main thread, with the socket to the agent."""
    started = time.monotonic()
    print(f"--- {order.start.worker} on {order.node}, attempt {order.attempt}, pid {os.getpid()}")
    route_output()
    be_worker(order.start.role)
    worker = Worker(order)
    sys.path.extend(worker.config.run.code_path)  # at the end: nothing of the user's may hide ours
    service = Service(worker, sock)
    is_shared, kv_tokens = order.start.is_shared, 0
    loop: Callable[[], NoReturn]
    if worker.role is Role.TRAIN:
        with with_the_others(worker, "its start"):
            worker.trainer = make_trainer(worker, can_sleep=is_shared)
        loop = service.run_tasks
    elif worker.role is Role.REWARD and worker.config.judge_engine is None:
        loop = service.run_tasks  # none of its own: each of its stage tasks has a thread
    else:
        engine = make_engine(worker, order.start.version, can_sleep=is_shared)
        watchdog = Watchdog("limits.engine_s", worker.config.limits.engine_s)
        worker.engine = EngineHost(engine, service.report_counts, watchdog)
        kv_tokens, loop = engine.kv_tokens, worker.engine.run

    def ready() -> None:
        service.say(
            wire.WorkerReady(
                worker=worker.name,
                version=worker.version,
                pid=os.getpid(),
                seconds={"start": time.monotonic() - started},
                is_asleep=is_shared,
                held_bytes=held_bytes(),
                kv_tokens=kv_tokens,
            )
        )

    if is_shared:
        worker.warm()
        service.shift.release(ready)  # by what `loop` does first
    else:
        ready()
    threading.Thread(target=service.read, name="reader", daemon=True).start()
    period_s = beat_period_s(worker.config.limits.engine_s)
    threading.Thread(target=service.live, args=(period_s,), name="alive", daemon=True).start()
    loop()


def rss_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES
