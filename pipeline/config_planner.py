"""`placement.planner`: when GPUs are shifted between rollout and reward. One set of values is meant for all models and
machines; where each comes from stands in `core/planner/settings.py`, which holds the defaults.
"""

from typing import Literal

from pydantic import Field

from pipeline.config_types import Float, Int, Section
from pipeline.core.planner.settings import DEFAULT, PlannerSettings


class Shift(Section):
    """At the moment when `step` is `at`, `blocks` begin to change to `role`."""

    step: Int = Field(ge=1, description="Of this step")
    at: Literal["admitted", "rolled_out", "judged", "trained"] = Field(description="What has just happened to it")
    blocks: list[Int] = Field(min_length=1, description="Counted from 0, node by node")
    role: Literal["rollout", "reward"] = Field(description="Who gets them")


class Planner(Section):
    """Shares are of the cycle, the time from one version to the next."""

    enabled: bool = Field(
        default=True, description="false: GPUs are shifted as `schedule` says, and where a step could not go on"
    )
    schedule: list[Shift] = Field(default=[], description="Shifts by hand, for experiments: each is made once")
    horizon: Float = Field(
        default=DEFAULT.horizon,
        ge=1,
        le=4,
        description="How far it looks, as a multiple of the time that the work or the tail of two steps takes; "
        "less than 1 does not see them end, more makes its time steps coarser",
    )
    epsilon: Float = Field(
        default=DEFAULT.epsilon,
        ge=0,
        lt=1,
        description="A shift must promise more than this share of the cycle: below it predictions differ by chance",
    )
    min_dwell_s: Float = Field(
        default=DEFAULT.min_dwell_s,
        ge=0,
        le=3600,
        description="After a shift none for so long, where `dwell_share` is less: a shift must live to pay its seconds",
    )
    dwell_share: Float = Field(
        default=DEFAULT.dwell_share, ge=0, lt=1, description="The same as a share: bounds the shifts of a step"
    )
    hold_share: Float = Field(
        default=DEFAULT.hold_share,
        ge=0,
        lt=1,
        description="The look-ahead keeps a split that it tries for so long, then goes on by a rule; too short and all "
        "look alike, too long and none looks good",
    )
    tick_s: Float = Field(
        default=DEFAULT.tick_s,
        ge=0.1,
        le=3600,
        description="The planner is asked this often, where `tick_share` is less, beside at each event of a step",
    )
    tick_share: Float = Field(
        default=DEFAULT.tick_share, ge=0, lt=1, description="The same as a share: a longer cycle changes more slowly"
    )
    num_steps: Int = Field(
        default=DEFAULT.num_steps,
        ge=8,
        le=1024,
        description="Time steps of the look-ahead: more tell ends apart better, its time grows with them",
    )
    num_coarse: Int = Field(
        default=DEFAULT.num_coarse,
        ge=2,
        le=1024,
        description="Splits that are tried over the whole range, so that a far better one is found at once",
    )
    num_near: Int = Field(
        default=DEFAULT.num_near,
        ge=1,
        le=1024,
        description="Splits that are tried on either side of the present one, so that the last blocks are found",
    )

    def settings(self) -> PlannerSettings:
        return PlannerSettings(**self.model_dump(exclude={"enabled", "schedule"}))
