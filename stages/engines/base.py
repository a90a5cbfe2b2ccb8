"""The port behind which an inference engine sits. Every engine passes tests/contracts/test_engine.py.

One thread (the worker's main thread) touches an engine. `step()` advances all requests by at least one token;
between two steps the engine is at a token boundary, so `abort`, `load` and `sleep` are called there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pipeline.gps.store import Reader, Store
from pipeline.wire_shift import Probe


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """`prompt_ids` may end with tokens generated before an abort, `num_kept` of them; `max_tokens` counts what is still
    allowed.

    `seed`: of this request's own random stream (None: the engine's). `choices`: the output must be one of these
    strings (structured verdicts); `regex`: it must match. At most one of the two.
    """

    id: str
    prompt_ids: Sequence[int]
    max_tokens: int
    temperature: float = 1.0
    seed: int | None = None
    stop_ids: Sequence[int] = ()
    logprobs: bool = True
    choices: Sequence[str] = ()
    regex: str = ""
    num_kept: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """New tokens of one request since its last output. `finish`: "" while it goes on, else stop, length or abort.

    `logprobs` are those of the distribution sampled from (after temperature), one per token, [] if not asked for.
    `version` is that of the weights which made the tokens; without tokens, the engine's. `kv_version` is a bound: no
    cache that they were made from is of an older version than that (None: all are of `version`). `num_cached` of its
    prompt's tokens were in the cache when it began.
    """

    id: str
    version: int
    kv_version: int | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str = ""
    num_cached: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounts:
    """`held_tokens`: in its cache, of all that runs; 0 where nobody can say."""

    running: int
    waiting: int
    num_tokens: int  # generated since the start
    held_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a step did: it gave `batch` sequences a token, which read `context` tokens in sum, and computed
    `prefill_tokens` of prompts, of what was aborted before and of what had given way."""

    batch: int = 0
    context: int = 0
    prefill_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """How an engine stands, and what it did since the last report: the fields of pipeline.wire_counts.Counts.
    stages.engines.speed says how the seconds are told apart."""

    running: int
    waiting: int
    num_tokens: int
    kv_tokens: int = 0
    num_iterations: int = 0
    decode_s: float = 0.0
    batch: float = 0.0
    context: float = 0.0
    prefill_tokens: int = 0
    prefill_s: float = 0.0
    num_started: int = 0
    started_tokens: int = 0
    started_prefill_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A version of the weights in its node's store, for who reads it: an engine, or each of its ranks for itself."""

    store: Store
    version: int
    wait_s: float  # how long for a slot that is being written
    is_pinned: bool = False  # whether who starts with it registers its memory with the CUDA driver

    def read(self) -> Reader:
        """Raises what Store.read does."""
        return self.store.read(self.version, self.wait_s)


class Engine(Protocol):
    version: int
    """The version of the weights that it answers with; each segment carries it."""
    kv_tokens: int
    """What its cache has room for."""
    is_asleep: bool

    def add(self, request: Request) -> None:
        """Raises ValueError for a request it can never serve (empty, too long, unknown token id)."""

    def step(self) -> list[Output]:
        """One iteration. Returns at least one token for every running request, or nothing if there is none."""

    def work(self) -> Work:
        """Of the last step."""

    def has_unfinished(self) -> bool: ...

    def abort(self, ids: Sequence[str] | None = None) -> list[Output]:
        """Stop these requests (None: all), wherever they are. One final output (finish "abort") for each,
        with any tokens not yet returned by `step`; unknown ids are ignored."""

    def load(self, stored: Stored, probe: Probe | None = None, *, keep_kv: bool = False) -> None:
        """Take this version, in place, and drop every cache that depends on old weights.

        Names, shapes and dtypes must match those of the current model exactly, else UpdateRefused is raised and
        the old weights stay. No request may be unfinished; with `keep_kv` they may, and go on with the caches that
        they have. `probe`, if given, is checked afterwards, without a token for any other request: RuntimeError says
        that the weights now served are not the trainer's. After any error, requests that are unfinished must be
        aborted before the next step.
        """

    def sleep(self) -> None:
        """Give up the memory of weights and caches, in place: the process, what is compiled, captured and connected
        stays. No request may be unfinished. Raises RuntimeError where memory stays taken, or where the engine was not
        started with `can_sleep`. While it sleeps, so do `add`, `step`, `load` and `sleep`."""

    def wake(self, stored: Stored, probe: Probe | None = None) -> dict[str, float]:
        """Take the memory again, with this version and empty caches; afterwards it is as an engine that was started
        with it. Raises what `load` does: UpdateRefused leaves it asleep, after any other
        error nobody knows what it holds. Returns its seconds: of the weights (`read`) and of the rest (`cache`)."""

    def counts(self) -> EngineCounts: ...

    def close(self) -> None: ...
