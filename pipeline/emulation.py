"""What emulated engines and trainers take, and how long what they say is: their options, and the seconds that follow.

    engine   `rollout.engine.options`, `reward.genrm.engine.options`     trainer   `trainer.options`

Time may run faster, and a token may stand for many, so that a large cluster fits on a small machine:

    time_scale   seconds here for one there: .1 is ten times as fast
    grain        tokens of the model for which one here stands; an iteration here is so many there

A replica's true speed may differ from its profile and change, and responses may become longer or shorter as versions
go on (`Unevenness`); nobody who plans is told.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self
from zlib import crc32

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pipeline.core.iteration import IterationCost
from pipeline.simulator.cost import TrainCost, cost_model, train_cost

_LENGTH_PERIOD = 4  # versions: a few steps have seen all of it


class Unevenness(BaseModel):
    """Shares by which the truth swings around the profile: `speed` of each replica, with a phase and a period of its
    own around `period_s` (here, not there); `length` of responses, with the version of the weights."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    speed: float = Field(default=0.0, ge=0, lt=1)
    period_s: float = Field(default=60.0, gt=0)
    length: float = Field(default=0.0, ge=0, lt=1)

    def slower(self, name: str, now: float) -> float:
        """The factor of the replica's seconds at `now`."""
        if not self.speed:
            return 1.0
        phase, pace = _share(name, "phase"), 0.7 + 0.6 * _share(name, "pace")
        return 1 + self.speed * math.sin(2 * math.pi * (now * pace / self.period_s + phase))

    def longer(self, version: int) -> float:
        return 1 + self.length * math.sin(2 * math.pi * version / _LENGTH_PERIOD) if self.length else 1.0


EVEN = Unevenness()


class Timing(BaseModel):
    """Of an engine. `lengths`: of responses, (share, median in the model's tokens, sigma of the logarithm) of each
    part of a mixture; empty: one part of `median_tokens` and `sigma`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    median_tokens: float = 32.0
    sigma: float = 0.5
    lengths: list[tuple[float, float, float]] = []
    kv_bytes_per_token: int = 1024
    profile: str = "instant"  # of pipeline.simulator.cost
    num_gpus: int = Field(default=1, ge=1)  # of the profile's, for one replica
    step_s: float = 0.0  # added to every step
    time_scale: float = Field(default=1.0, gt=0)
    grain: int = Field(default=1, ge=1)
    sleep_s: float = 0.0  # what each takes, here
    wake_s: float = 0.0
    update_s: float = 0.0
    uneven: Unevenness = EVEN

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """What of an engine's options is about this. Raises ValueError."""
        return cls.model_validate({name: value for name, value in options.items() if name in cls.model_fields})

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if self.lengths and abs(sum(share for share, _, _ in self.lengths) - 1) > 1e-6:
            raise ValueError(f"lengths: the shares of {self.lengths} do not add up to 1")
        return self

    @property
    def parts(self) -> list[tuple[float, float, float]]:
        """Of the mixture, in tokens here."""
        parts = self.lengths or [(1.0, self.median_tokens, self.sigma)]
        return [(share, median / self.grain, sigma) for share, median, sigma in parts]

    def cost(self) -> IterationCost:
        """Of a token here. Raises ValueError for an unknown profile."""
        there = cost_model(self.profile, self.num_gpus)
        here = there.slower(self.grain * self.time_scale)
        # One token here is `grain` there: as many more bytes of cache to read, once for each of `grain` iterations.
        here = replace(here, kv_s=here.kv_s * self.grain)
        return replace(here, overhead_s=here.overhead_s + self.step_s)


class TrainTiming(BaseModel):
    """Of a trainer: `step_seconds`, and beside it what the profile (`<gpu>:<model>` on `num_gpus`) says of the tokens
    that it is given."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    step_seconds: float = 0.0
    profile: str = ""
    num_gpus: int = Field(default=1, ge=1)
    time_scale: float = Field(default=1.0, gt=0)
    grain: int = Field(default=1, ge=1)
    sleep_s: float = 0.0
    wake_s: float = 0.0
    uneven: Unevenness = EVEN

    def step_s(self, contexts: list[tuple[int, int]], now: float) -> float:
        """Of a batch: of each sequence the tokens of its prompt and of its response, here."""
        return self.step_seconds + self._profile_s(contexts) * self.uneven.slower("train", now)

    def _profile_s(self, contexts: list[tuple[int, int]]) -> float:
        if not self.profile or not contexts:
            return 0.0
        responses = [response for _, response in contexts]
        mean_context = self.grain * sum(r * r for r in responses) / (2 * max(1, sum(responses)))
        num_tokens = float(self.grain * sum(prompt + response for prompt, response in contexts))
        there = self._cost.step_s(num_tokens=num_tokens, mean_context=mean_context, num_gpus=self.num_gpus)
        return there * self.time_scale

    @property
    def _cost(self) -> TrainCost:
        return train_cost(self.profile)


def _share(name: str, what: str) -> float:
    return crc32(f"{what} {name}".encode()) / 2**32
