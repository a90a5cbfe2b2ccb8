"""How a worker changes places with others on its slots: down when its tasks have ended, up with the weights it is told.

    awake ─Sleep▶ its tasks leave ─▶ engine or trainer gives its memory up ─Slept▶ asleep
    asleep ─Wake▶ engine or trainer takes its memory ─Woken▶ awake; or WakeFailed: nobody knows what it holds

Nothing here waits: each part begins where the one before ends, on the engine's thread or the trainer's. A sleep that
fails ends the process, which still holds what others are to have.
"""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from pipeline import wire
from pipeline.core.errors import WeightsUnavailable
from pipeline.core.events import Role
from pipeline.kill_points import kill_point
from pipeline.memory import device_bytes
from pipeline.stage import Order
from pipeline.wire_shift import Prepare, Slept, Wake, WakeFailed, Woken
from stages.engines import counters
from stages.engines.base import Stored
from stages.task import Task

if TYPE_CHECKING:
    from stages.worker import Worker


class Shift:
    """Of one worker. `tasks` are those that it runs now; `on_main(function)` has the trainer's thread call it next."""

    def __init__(
        self,
        worker: "Worker",
        tasks: dict[str, Task],
        say: Callable[[wire.FromWorker], None],
        on_main: Callable[[Callable[[], None]], None],
    ) -> None:
        self._worker, self._tasks, self._say, self._on_main = worker, tasks, say, on_main
        self._lock = threading.Lock()
        self._asked_at: float | None = None
        self._leaving: list[Task] = []
        self._num_aborted_before = 0

    # --- down ------------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        kill_point("down.begin")
        with self._lock:
            self._asked_at, self._leaving = time.monotonic(), self._in_need()
            self._num_aborted_before = sum(task.num_aborted for task in self._leaving)
        for task in self._leaving:
            task.give(Order("leave"))
        self.go_on()

    def go_on(self) -> None:
        """A task has ended, or is known to need no slots."""
        with self._lock:
            if self._asked_at is None or self._in_need():
                return
            asked_at, self._asked_at = self._asked_at, None
        kill_point("down.aborted")
        num_aborted = sum(task.num_aborted for task in self._leaving) - self._num_aborted_before
        ended_at = time.monotonic()

        def say() -> None:
            seconds = {"tasks": ended_at - asked_at, "release": time.monotonic() - ended_at}
            slept = Slept(
                worker=self._worker.name,
                held_bytes=held_bytes(),
                num_aborted=num_aborted,
                seconds=seconds,
                costly=asdict(counters.so_far()),
            )
            self._say(slept)

        self.release(say)

    def release(self, then: Callable[[], None]) -> None:
        """Give the slots' memory up; `then` is called on the thread that did it."""
        engine, trainer = self._worker.engine, self._worker.trainer

        def end(error: Exception | None) -> None:
            if error is not None:
                raise error
            for store in self._worker.stores:
                store.forget_pages()
            then()

        def release_trainer() -> None:
            assert trainer is not None
            trainer.sleep()
            end(None)

        if engine is not None:
            engine.sleep(end)
        else:
            self._on_main(release_trainer)

    def _in_need(self) -> list[Task]:
        """Those that must end first. A trainer's thread does one thing at a time, and shifts before tasks that wait."""
        if self._worker.engine is None:
            return []
        return [task for task in list(self._tasks.values()) if task.spec.needs_slots]

    # --- up --------------------------------------------------------------------------------------------------------

    def prepare(self, message: Prepare) -> None:
        """Nothing is held afterwards: no writer waits for a wake that is late, or never comes."""
        if self._worker.trainer is None:
            threading.Thread(target=self._populate, args=(message.version,), name="prepare", daemon=True).start()

    def wake(self, message: Wake) -> None:
        kill_point("up.begin")
        engine = self._worker.engine
        if engine is None:
            self._on_main(self._wake_trainer)
            return
        engine.wake(
            self._weights(message.version),
            message.probe,
            on_end=lambda error: self._end_wake(error, engine.seconds),
        )

    def _wake_trainer(self) -> None:
        trainer, started = self._worker.trainer, time.monotonic()
        assert trainer is not None
        try:
            trainer.wake()
        except Exception as error:
            self._end_wake(error, {})
        else:
            self._end_wake(None, {"restore": time.monotonic() - started})

    def _end_wake(self, error: Exception | None, seconds: dict[str, float]) -> None:
        worker = self._worker
        if error is not None:
            reason = "".join(traceback.format_exception(error))
            print(f"it did not wake: {reason}")
            self._say(WakeFailed(worker=worker.name, reason=reason))
            return
        kill_point("up.done")
        woken = Woken(
            worker=worker.name,
            version=worker.version,
            held_bytes=held_bytes(),
            seconds=seconds,
            costly=asdict(counters.so_far()),
        )
        self._say(woken)

    def _weights(self, version: int) -> Stored:
        is_judge = self._worker.role is Role.REWARD
        store, version = (self._worker.genrm, 0) if is_judge else (self._worker.policy, version)
        return Stored(store=store, version=version, wait_s=self._worker.config.limits.publish_s)

    def _populate(self, version: int) -> None:
        try:
            with self._weights(version).read() as reader:
                reader.populate()
        except WeightsUnavailable as error:
            print(f"version {version} cannot be read ahead: {error}")


def held_bytes() -> int:
    """What this process holds of a GPU. Without one 0: the agent looks for itself, and once is enough."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    held = device_bytes(os.getpid())
    return int(torch.cuda.memory_reserved()) if held is None else held
