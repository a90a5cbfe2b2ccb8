"""The channel's messages about workers that change places on their slots.

    controller ─Sleep▶ worker: its tasks end, what they ran goes back ─▶ Slept
    controller ─Prepare▶ the one that follows it
    controller ─Wake▶ the one that follows it ─▶ Woken, or WakeFailed

The agent relays them, and looks whether they are true: a slot is never given while it is not free.
"""

import msgspec


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """As those of pipeline.wire."""


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """What the trainer says the next greedy token of each prompt is, under the new weights."""

    prompts: list[list[int]]
    tokens: list[int]
    logprobs: list[float]
    tolerance: float


class Prepare(_Message, frozen=True):
    """To a sleeping worker: it is to be woken with this version soon. Nothing that needs its slots is done yet."""

    worker: str
    version: int


class Sleep(_Message, frozen=True):
    """End all tasks, put back what they run, free what the slots hold. Answered by Slept."""

    worker: str


class Wake(_Message, frozen=True):
    """Take the slots, which are free, with the weights of `version`. Answered by Woken or WakeFailed."""

    worker: str
    version: int
    probe: Probe | None


class Slept(_Message, frozen=True):
    """Its slots are free: what it still holds, `held_bytes` as its agent measured them, is no more than it may.
    `seconds`: by phase (`tasks`, `release`); `num_aborted` sequences went back. `costly`: how often its process has
    done so far what no shift may do (stages.engines.counters)."""

    worker: str
    held_bytes: int
    num_aborted: int
    seconds: dict[str, float]
    costly: dict[str, int] = {}


class Woken(_Message, frozen=True):
    """`seconds`: by phase (`read`, `cache`; a trainer's: `restore`). `costly`: as in Slept."""

    worker: str
    version: int
    held_bytes: int
    seconds: dict[str, float]
    costly: dict[str, int] = {}


class WakeFailed(_Message, frozen=True):
    worker: str
    reason: str
