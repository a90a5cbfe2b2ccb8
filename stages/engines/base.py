"""The port behind which an inference engine sits. Every engine passes tests/contracts/test_engine.py.

One thread (the worker's main thread) touches an engine. `step()` advances all requests by at least one token;
between two steps the engine is at a token boundary, so `abort` and `load` are called there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pipeline.gps.store import Reader
from pipeline.wire_shift import Probe


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """`prompt_ids` may end with tokens generated before an abort; `max_tokens` counts what is still allowed.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """New tokens of one request since its last output. `finish`: "" while it goes on, else stop, length or abort.

    `logprobs` are those of the distribution sampled from (after temperature), one per token, [] if not asked for.
    `version` is that of the weights which made the tokens; without tokens, the engine's. `kv_version` is a bound: no
    cache that they were made from is of an older version than that (None: all are of `version`).
    """

    id: str
    version: int
    kv_version: int | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounts:
    """`held_tokens`: in its cache, of all that runs; 0 where nobody can say."""

    running: int
    waiting: int
    num_tokens: int  # generated since the start
    held_tokens: int = 0


class Engine(Protocol):
    version: int
    """The version of the weights that it answers with; each segment carries it."""
    kv_tokens: int
    """What its cache has room for."""

    def add(self, request: Request) -> None:
        """Raises ValueError for a request it can never serve (empty, too long, unknown token id)."""

    def step(self) -> list[Output]:
        """One iteration. Returns at least one token for every running request, or nothing if there is none."""

    def has_unfinished(self) -> bool: ...

    def abort(self, ids: Sequence[str] | None = None) -> list[Output]:
        """Stop these requests (None: all), wherever they are. One final output (finish "abort") for each,
        with any tokens not yet returned by `step`; unknown ids are ignored."""

    def load(self, reader: Reader, probe: Probe | None = None, *, keep_kv: bool = False) -> None:
        """Take the version that `reader` holds, in place, and drop every cache that depends on old weights.

        Names, shapes and dtypes must match those of the current model exactly, else UpdateRefused is raised and
        the old weights stay. No request may be unfinished; with `keep_kv` they may, and go on with the caches that
        they have. `probe`, if given, is checked afterwards, without a token for any other request: RuntimeError says
        that the weights now served are not the trainer's. After any error, requests that are unfinished must be
        aborted before the next step.
        """

    def sleep(self) -> None:
        """Give up the memory of weights and caches, in place: the process, what is compiled, captured and connected
        stays. No request may be unfinished. Afterwards nothing but `wake`, `counts` and `close` may be called. Raises
        RuntimeError where memory stays taken."""

    def wake(self, reader: Reader, probe: Probe | None = None) -> None:
        """Take the memory again, with the version that `reader` holds and empty caches; raises what `load` does. After
        an error nobody knows what it holds."""

    def counts(self) -> EngineCounts: ...

    def close(self) -> None: ...
