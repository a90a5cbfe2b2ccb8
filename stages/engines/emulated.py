"""An engine without a model: it passes the contract suite of the real one, in milliseconds and without torch.

It keeps what matters to its callers: a KV budget and a batch limit, waiting and preemption, time that depends on the
batch, aborts at token boundaries, weight versions that show in every logprob, and faults when told so.
"""

import re
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field

from pipeline.config_engine import EngineOptions
from pipeline.core.errors import UpdateRefused
from pipeline.emulation import Timing
from pipeline.gps.segment import EMULATED_NAME
from pipeline.gps.store import Reader
from pipeline.kill_points import kill_point
from pipeline.wire_shift import Probe
from stages.ballast import Ballast
from stages.engines import stream
from stages.engines.base import EngineCounts, Output, Request, Stored, Work
from stages.engines.check import check_request, must_be_able_to_sleep, must_be_asleep, must_be_awake
from stages.engines.faults import Fault, Faults
from stages.weights.compare import differing

_LATE_S = 0.25
"""A step that begins so much later than the one before it ended has lost that time."""


class EmulatedOptions(Timing):
    """`rollout.engine.options` and `reward.genrm.engine.options` of an emulated engine."""

    script: Literal["", "judge"] = ""  # judge: every response is a critique that ends with a verdict
    vocab_size: int = stream.VOCAB_SIZE
    holds_bytes: int = Field(default=0, ge=0)  # of memory, while it is awake
    faults: list[Fault] = Field(default=[])


@dataclass(slots=True)
class _Sequence:
    request: Request
    seed: int
    length: int  # tokens that this request would generate, the stop token among them
    script: list[int]  # what it says instead of the stream
    kv_version: int = 0  # of the weights that were there when it was last admitted
    generated: list[int] = field(default_factory=list)

    @property
    def context(self) -> int:
        return len(self.request.prompt_ids) + len(self.generated)


class EmulatedEngine:
    """The arguments are those of VllmEngine; `model_path` and `dtype` play no part. `name`: the
    replica's, from which follows how its speed is uneven."""

    def __init__(
        self,
        model_path: str,
        dtype: str,
        options: EngineOptions,
        max_model_len: int,
        stored: Stored,
        seed: int,
        *,
        structured: bool = True,
        trust_remote_code: bool = False,
        can_sleep: bool = False,
        name: str = "",
    ) -> None:
        self._options = EmulatedOptions.model_validate(options.options)
        self._cost = self._options.cost()
        self._parts = self._options.parts
        self._name = name
        self._ended = 0.0  # the last step, by the cost model; 0: none that the next one follows at once
        self._faults = Faults(self._options.faults)
        self.kv_tokens = options.kv_cache_bytes // self._options.kv_bytes_per_token
        if self.kv_tokens < max_model_len:
            raise ValueError(
                f"kv_cache_bytes {options.kv_cache_bytes} hold {self.kv_tokens} tokens of "
                f"{self._options.kv_bytes_per_token} bytes each: not one sequence of {max_model_len}"
            )
        self._max_num_seqs = options.max_num_seqs
        self._max_model_len = max_model_len
        self._seed = seed
        self._entries = dict(stored.store.entries)
        with stored.read() as reader:
            self._take(reader, None)
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._num_requests = self._num_steps = self._num_tokens = 0
        self._num_sleeps = self._num_wakes = 0
        self._work = Work()
        self._can_sleep = can_sleep
        self.is_asleep = False
        self._memory: Ballast | None = Ballast(self._options.holds_bytes)

    def add(self, request: Request) -> None:
        must_be_awake(self)
        check_request(request, max_model_len=self._max_model_len, vocab_size=self._options.vocab_size)
        if any(sequence.request.id == request.id for sequence in (*self._running, *self._waiting)):
            raise ValueError(f"request {request.id} is already here")
        if not self.has_unfinished():
            self._ended = 0.0
        self._num_requests += 1
        seed = request.seed if request.seed is not None else (self._seed << 64) + self._num_requests
        if request.temperature == 0:
            seed = 0  # greedy: the same whatever the seed
        start = stream.begin(request.prompt_ids, seed, request.stop_ids)
        left = self._length_left(request, seed, len(request.prompt_ids) - start)
        self._waiting.append(_Sequence(request, seed, left, self._script(request)))

    def step(self) -> list[Output]:
        must_be_awake(self)
        if not self.has_unfinished():
            return []
        began = time.monotonic()
        self._num_steps += 1
        self._faults.in_step(self._num_steps)
        self._preempt()
        prefill = self._admit()
        self._work = Work(batch=len(self._running), context=self._held_tokens(), prefill_tokens=prefill)
        self._pass(began, self._step_seconds(self._work, began))
        outputs = [self._advance(sequence) for sequence in self._running]
        self._running = [s for s, output in zip(self._running, outputs, strict=True) if not output.finish]
        return outputs

    def work(self) -> Work:
        return self._work

    def has_unfinished(self) -> bool:
        return bool(self._running or self._waiting)

    def abort(self, ids: Sequence[str] | None = None) -> list[Output]:
        present = [s.request.id for s in (*self._running, *self._waiting)]
        wanted = set(present if ids is None else ids)
        aborted = [id for id in present if id in wanted]
        gone = set(aborted)
        self._running = [s for s in self._running if s.request.id not in gone]
        self._waiting = deque(s for s in self._waiting if s.request.id not in gone)
        return [Output(id=id, version=self.version, finish="abort") for id in aborted]

    def load(self, stored: Stored, probe: Probe | None = None, *, keep_kv: bool = False) -> None:
        must_be_awake(self)
        if self.has_unfinished() and not keep_kv:
            raise RuntimeError(f"weights cannot change under {len(self._running) + len(self._waiting)} requests")
        self._must_fit(stored)
        with stored.read() as reader:
            time.sleep(self._options.update_s)
            self._ended = 0.0
            self._take(reader, probe)

    def sleep(self) -> None:
        must_be_able_to_sleep(self, self._can_sleep)
        self._num_sleeps += 1
        self._faults.in_shift("sleep", self._num_sleeps)
        time.sleep(self._options.sleep_s)
        kill_point("down.release")
        if not self._faults.leaks(self._num_sleeps):
            self._free()
        self.is_asleep = True

    def wake(self, stored: Stored, probe: Probe | None = None) -> dict[str, float]:
        must_be_asleep(self)
        started = time.monotonic()
        self._must_fit(stored)
        self._num_wakes += 1
        self._faults.in_shift("wake", self._num_wakes)
        if self._faults.refuses_to_wake(self._num_wakes):
            raise RuntimeError(f"version {stored.version} does not wake it, as options.faults say")
        kill_point("up.weights")
        with stored.read() as reader:
            time.sleep(self._options.wake_s)
            read = time.monotonic()
            kill_point("up.cache")
            self._memory = self._memory or Ballast(self._options.holds_bytes)
            self.is_asleep = False
            self._take(reader, probe)
        return {"read": read - started, "cache": time.monotonic() - read}

    def counts(self) -> EngineCounts:
        return EngineCounts(
            running=len(self._running),
            waiting=len(self._waiting),
            num_tokens=self._num_tokens,
            held_tokens=self._held_tokens(),
        )

    def close(self) -> None:
        self._free()

    def _free(self) -> None:
        if self._memory:
            self._memory.close()
            self._memory = None

    def _must_fit(self, stored: Stored) -> None:
        if self._faults.refuses(stored.version):
            raise UpdateRefused(f"version {stored.version} is refused, as options.faults say")
        if differences := differing(stored.store.entries, self._entries):
            raise UpdateRefused(f"version {stored.version} does not fit the engine: {differences}")

    def _take(self, reader: Reader, probe: Probe | None) -> None:
        self._content = stream.content_of(reader)
        self.version = reader.version
        if probe is not None:
            _check(probe, reader)

    def _held_tokens(self) -> int:
        return sum(sequence.context for sequence in self._running)

    def _length_left(self, request: Request, seed: int, num_said: int) -> int:
        """`num_said` tokens of the prompt are of this stream. Others, kept from a stream with another seed, only say
        how long it is at least."""
        longer = self._options.uneven.longer(self.version)
        if request.num_kept > num_said:
            return stream.length_of(seed, self._parts, longer, request.num_kept) - request.num_kept
        return max(1, stream.length_of(seed, self._parts, longer) - num_said)

    def _script(self, request: Request) -> list[int]:
        if request.choices:
            text = stream.choice_of(request.prompt_ids, request.choices)
        elif self._options.script == "judge":
            text = stream.verdict_text(
                request.prompt_ids, self._parts if self._options.lengths else (), request.max_tokens
            )
        else:
            text = ""
        if request.regex and not re.fullmatch(request.regex, text):
            raise ValueError(f"request {request.id}: the emulated engine says nothing that fits {request.regex!r}")
        return [*stream.text_ids(text), *(request.stop_ids[:1] or [stream.END_ID])] if text else []

    def _preempt(self) -> None:
        """The youngest give way when the running ones would outgrow the KV budget; they keep their tokens."""
        while sum(s.context + 1 for s in self._running) > self.kv_tokens:
            self._waiting.appendleft(self._running.pop())

    def _admit(self) -> int:
        used, prefill = sum(s.context + 1 for s in self._running), 0
        while self._waiting and len(self._running) < self._max_num_seqs:
            needed = self._waiting[0].context + 1
            if used + needed > self.kv_tokens:
                break
            used, prefill = used + needed, prefill + needed - 1
            self._running.append(self._waiting.popleft())
            self._running[-1].kv_version = self.version
        return prefill

    def _step_seconds(self, work: Work, now: float) -> float:
        cost = self._cost.iteration_s(work.batch, work.context) + work.prefill_tokens * self._cost.prefill_s
        return float(cost * self._options.uneven.slower(self._name, now))

    def _pass(self, began: float, seconds: float) -> None:
        """Until the step's end. What Python took between two steps in a row is part of the seconds: they add up to what
        the cost model says, unless this process was starved of its processor."""
        if began - self._ended > _LATE_S:
            self._ended = began
        self._ended += seconds
        time.sleep(max(0.0, self._ended - time.monotonic()))

    def _advance(self, sequence: _Sequence) -> Output:
        request, position, count = sequence.request, sequence.context, len(sequence.generated)
        if sequence.script:
            token = sequence.script[count]
        elif request.stop_ids and count + 1 >= sequence.length:
            token = request.stop_ids[0]
        else:
            token = stream.token_at(sequence.seed, position, request.stop_ids)
        sequence.generated.append(token)
        self._num_tokens += 1
        finish = ""
        if token in request.stop_ids or count + 1 == len(sequence.script):
            finish = "stop"
        elif count + 1 == request.max_tokens or sequence.context == self._max_model_len:
            finish = "length"
        logprobs = [stream.logprob_at(self.version, self._content, position, token)] if request.logprobs else []
        kept = None if sequence.kv_version == self.version else sequence.kv_version
        return Output(
            id=request.id, version=self.version, kv_version=kept, tokens=[token], logprobs=logprobs, finish=finish
        )


def _check(probe: Probe, reader: Reader) -> None:
    if EMULATED_NAME not in reader.entries:
        raise RuntimeError("the emulated engine cannot answer the probe of a real model")
    token, logprob = stream.greedy_answer(reader)
    for wanted, expected in zip(probe.tokens, probe.logprobs, strict=True):
        if wanted != token or abs(expected - logprob) > probe.tolerance:
            raise RuntimeError(
                f"version {reader.version} is not the trainer's: the probe wants token {wanted} with logprob "
                f"{expected:.6f}, the engine has token {token} with {logprob:.6f}"
            )
