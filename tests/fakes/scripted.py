"""A scripted engine behind the real EngineHost, a task double, and a real queue server: what stage tests run on."""

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config import Config
from pipeline.core.events import SegmentInfo, VerdictInfo
from pipeline.run_folder import RunFolder, read_json
from pipeline.stage import Order, StageSpec
from stages.engines.base import EngineCounts, Output, Request, Stored, Work
from stages.engines.check import must_be_able_to_sleep, must_be_asleep, must_be_awake
from stages.engines.host import EngineHost
from stages.text import ByteTokenizer, Tokenizer

if TYPE_CHECKING:
    from pipeline.queue.client import QueueClient

WAIT_S = 20.0


def make_config(**sections: Any) -> Config:
    """An all-emulated config; keyword sections are merged into it."""
    tree: dict[str, Any] = {
        "model": {"policy": {"path": "emulated"}, "genrm": {"path": "emulated"}},
        "data": {"train_files": ["absent.jsonl"], "train_batch_size": 2},
        "rollout": {"n": 2, "max_response_length": 16, "engine": {"name": "emulated"}},
        "reward": {"genrm": {"template": "{{ prompt }}|{{ response }}", "engine": {"name": "emulated"}}},
        "trainer": {"total_training_steps": 4, "strategy": "emulated"},
    }
    return Config.model_validate(merged(tree, sections))


def merged(tree: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    both = {k: merged(tree[k], v) for k, v in changes.items() if isinstance(v, dict) and isinstance(tree.get(k), dict)}
    return tree | changes | both


def wait_until(condition: Callable[[], bool]) -> None:
    """For conditions that nobody announces."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@dataclass(frozen=True, kw_only=True)
class Script:
    """What the engine answers to a request: `tokens`, one a step, then `finish`.

    `hold_after`: after so many tokens it is silent until `engine.released` is set. `finish` "" : it never ends.
    """

    tokens: Sequence[int]
    finish: str = "stop"
    hold_after: int | None = None
    num_logprobs: int | None = None
    is_refused: bool = False


class ScriptedEngine:
    """A pipeline engine that plays scripts, and remembers every request."""

    def __init__(self, script: Callable[[Request], Script], version: int = 0) -> None:
        self.version = version
        self.kv_tokens = 1 << 20
        self.is_asleep = False
        self.requests: list[Request] = []
        self.released = threading.Event()
        self.unloadable: set[int] = set()
        self._kept: dict[str, int] = {}
        self._script = script
        self._running: dict[str, tuple[Script, int]] = {}
        self._num_tokens = 0
        self._work = Work()

    def add(self, request: Request) -> None:
        must_be_awake(self)
        self.requests.append(request)
        script = self._script(request)
        if script.is_refused:
            raise ValueError(f"{request.id} is too long")
        self._running[request.id] = (script, 0)

    def step(self) -> list[Output]:
        outputs = []
        for id, (script, at) in list(self._running.items()):
            if at == script.hold_after and not self.released.is_set():
                continue
            token = list(script.tokens[at : at + 1])
            is_last = at + 1 >= len(script.tokens)
            finish = script.finish if is_last else ""
            if not token and not finish:
                continue
            num_logprobs = len(token) if script.num_logprobs is None else script.num_logprobs
            logprobs = [-0.5 - at] * num_logprobs
            made = {"tokens": token, "logprobs": logprobs, "finish": finish, "kv_version": self._kept.get(id)}
            outputs.append(Output(id=id, version=self.version, **made))
            self._running[id] = (script, at + 1)
            self._num_tokens += len(token)
            if finish:
                del self._running[id]
        if not outputs:
            time.sleep(0.001)  # as long as a step: silent requests must not spin
        self._work = Work(batch=len(outputs), context=sum(at for _, at in self._running.values()))
        return outputs

    def work(self) -> Work:
        return self._work

    def has_unfinished(self) -> bool:
        return bool(self._running)

    def abort(self, ids: Sequence[str] | None = None) -> list[Output]:
        gone = [i for i in (list(self._running) if ids is None else ids) if i in self._running]
        for id in gone:
            del self._running[id]
        return [Output(id=id, version=self.version, finish="abort") for id in gone]

    def load(self, stored: Stored, probe: Any = None, *, keep_kv: bool = False) -> None:
        if self._running and not keep_kv:
            raise RuntimeError(f"weights cannot change under {len(self._running)} requests")
        if stored.version in self.unloadable:
            raise RuntimeError(f"version {stored.version} cannot be loaded")
        self._kept = {id: self._kept.get(id, self.version) for id, (_, at) in self._running.items() if at}
        self.version = stored.version

    def sleep(self) -> None:
        must_be_able_to_sleep(self, True)
        self.is_asleep = True

    def wake(self, stored: Stored, probe: Any = None) -> dict[str, float]:
        must_be_asleep(self)
        if stored.version in self.unloadable:
            raise RuntimeError(f"version {stored.version} cannot be loaded")
        self.is_asleep, self.version = False, stored.version
        return {"read": 0.0, "cache": 0.0}

    def counts(self) -> EngineCounts:
        return EngineCounts(running=len(self._running), waiting=0, num_tokens=self._num_tokens)

    def close(self) -> None: ...


@contextmanager
def hosted(engine: Any) -> Iterator[EngineHost]:
    """The real host on a thread of its own."""
    host = EngineHost(engine, lambda counts: None)

    def run() -> None:
        with suppress(SystemExit):
            host.run()

    thread = threading.Thread(target=run, name="engine", daemon=True)
    thread.start()
    try:
        yield host
    finally:
        host.post(_leave)
        thread.join(WAIT_S)


def load(host: EngineHost, version: int, keep_kv: bool = False) -> Exception | None:
    """Have a scripted engine load a version; how that ended."""
    ended: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
    host.load(_stored(version), None, keep_kv=keep_kv, on_end=ended.put)
    return ended.get(timeout=WAIT_S)


def sleep(host: EngineHost) -> Exception | None:
    ended: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
    host.sleep(ended.put)
    return ended.get(timeout=WAIT_S)


def wake(host: EngineHost, version: int) -> Exception | None:
    ended: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
    host.wake(_stored(version), None, on_end=ended.put)
    return ended.get(timeout=WAIT_S)


def _stored(version: int) -> Stored:
    """All that a scripted engine needs of weights is their version."""
    store: Any = None
    return Stored(store=store, version=version, wait_s=1.0)


def _leave(engine: Any) -> None:
    sys.exit()  # ends the host's thread, and only that


@dataclass(kw_only=True)
class FakeWorker:
    config: Config
    queue: "QueueClient | None" = None
    engine: EngineHost | None = None
    tokenizer: Tokenizer = field(default_factory=ByteTokenizer)
    name: str = "n0-rollout-0"


class FakeTask:
    """Gives orders to a stage function that runs in a thread, and keeps what it reports."""

    def __init__(self, worker: FakeWorker, *, step: int = 1, version: int = 0) -> None:
        self.worker = worker
        self.spec = StageSpec(task=f"task-{step}", stage="stage", step=step, version=version, attempt=1)
        self.admitted: list[str] = []
        self.segments: list[SegmentInfo] = []
        self.verdicts: list[VerdictInfo] = []
        self.num_reports = 0
        self.lines: list[str] = []
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._changed = threading.Condition()

    def next_order(self, timeout_s: float | None) -> Order | None:
        try:
            return self._orders.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def report_admitted(self, step: int, ids: list[str], num_prompt_tokens: Sequence[int] = ()) -> None:
        assert step == self.spec.step
        self._add(self.admitted, ids)

    def report_segments(self, segments: list[SegmentInfo]) -> None:
        self._add(self.segments, segments)

    def report_verdicts(self, verdicts: list[VerdictInfo]) -> None:
        self._add(self.verdicts, verdicts)

    def log(self, text: str) -> None:
        self.lines.append(text)

    def _add(self, kept: list[Any], new: Sequence[Any]) -> None:
        with self._changed:
            kept += new
            self.num_reports += 1
            self._changed.notify_all()

    def dispatch(self, ids: Sequence[str], turn: int = 1) -> None:
        self._orders.put(Order("dispatch", tuple(ids), (turn,) * len(ids)))

    def abort(self, ids: Sequence[str]) -> None:
        self._orders.put(Order("abort", tuple(ids)))

    def end(self) -> None:
        self._orders.put(Order("end"))

    def leave(self) -> None:
        self._orders.put(Order("leave"))

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Until reports make the condition true."""
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_S), (self.segments, self.verdicts, self.lines)

    def finals(self) -> dict[str, SegmentInfo]:
        """The last report of each sequence; asserts that no sequence was reported as ended twice."""
        ended = [s for s in self.segments if s.finish != "flush"]
        assert len({s.id for s in ended}) == len(ended), ended
        return {s.id: s for s in ended}


class Running:
    """A stage function in a thread."""

    def __init__(self, function: Callable[..., dict[str, Any]], task: FakeTask) -> None:
        self._outcome: queue.SimpleQueue[tuple[dict[str, Any] | None, BaseException | None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, args=(function, task), daemon=True).start()

    def _run(self, function: Callable[..., dict[str, Any]], task: FakeTask) -> None:
        try:
            self._outcome.put((function(task, task.spec), None))
        except BaseException as error:
            self._outcome.put((None, error))

    def result(self) -> dict[str, Any]:
        """What it returned; raises what it raised."""
        value, error = self._outcome.get(timeout=WAIT_S)
        if error is not None:
            raise error
        assert value is not None
        return value


@contextmanager
def queue_server(folder: Path) -> Iterator["QueueClient"]:
    """A real queue server of attempt 1 in its own process."""
    from pipeline.queue.client import QueueClient

    run = RunFolder(folder / "run")
    run.create()
    secret = os.urandom(32)
    (run.secrets / "queue.key").write_bytes(secret)
    command = [sys.executable, "-m", "pipeline.queue.server", str(run.path), "1"]
    with subprocess.Popen(command) as process:
        try:
            deadline = time.monotonic() + WAIT_S
            while (place := read_json(run.secrets / "queue-1.json")) is None:
                assert process.poll() is None and time.monotonic() < deadline, "the queue server did not start"
                time.sleep(0.01)
            client = QueueClient(place["endpoint"], secret, 1, 10.0)
            yield client
            client.close()
        finally:
            process.kill()
