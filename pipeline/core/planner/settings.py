"""The planner's one set of constants, for all models and machines. `docs/policies/planner.md` has the reasons."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    """Shares are of the cycle, the time from one version to the next."""

    epsilon: float = 0.015
    """A shift must promise more than this share."""
    dwell_share: float = 0.06
    min_dwell_s: float = 10.0
    """After a shift between the inference roles, none before the longer of the two."""
    hold_share: float = 0.20
    """The look-ahead keeps the first split for this long, then goes on by a rule."""
    tick_share: float = 0.05
    tick_s: float = 5.0
    """The planner is asked at least this often: the longer of the two."""
    horizon: float = 1.15
    """How far the look-ahead goes, as a multiple of the time that the work or the tail of two steps takes."""
    horizon_s: float = 0.0
    """Instead of it, a fixed one; only to see what that changes."""
    num_steps: int = 40
    """Of the look-ahead, shorter ones first."""
    num_coarse: int = 13
    """Splits tried over the whole range, beside those near the present one."""
    num_near: int = 2
    is_penalized: bool = True
    """Shifts cost their time in the look-ahead; False only to see what that changes."""

    def dwell_s(self, cycle_s: float) -> float:
        return max(self.min_dwell_s, self.dwell_share * cycle_s)

    def hold_s(self, cycle_s: float) -> float:
        return max(self.min_dwell_s, self.hold_share * cycle_s)

    def every_s(self, cycle_s: float) -> float:
        return max(self.tick_s, self.tick_share * cycle_s)


DEFAULT = PlannerSettings()
