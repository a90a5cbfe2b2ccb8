"""`placement`: which role has which slots, and when."""

from typing import Literal

from pydantic import Field

from pipeline.config_planner import Planner
from pipeline.config_types import Int, Section


class RolePlacement(Section):
    replicas: Int = Field(default=1, ge=1, description="How many; of train 1, for there `trainer.ranks` counts")
    slots: Int = Field(default=1, ge=1, description="Slots per replica")


class Roles(Section):
    rollout: RolePlacement = RolePlacement()
    reward: RolePlacement = RolePlacement()
    train: RolePlacement = RolePlacement()


class Placement(Section):
    mode: Literal["disaggregated", "colocated", "rollout_reward_colocated", "trainer_pool", "shiftable"] = Field(
        default="disaggregated",
        description="Who may have which slots: disaggregated (each role its own, as `roles` says), colocated (all "
        "roles all of them, one after the other), rollout_reward_colocated (those two share what does not train), "
        "trainer_pool (disaggregated, and what does not train rolls out), shiftable (the planner says). Where a role "
        "shares slots, `replicas` is not asked: it gets as many as there is room for",
    )
    admission: Literal["stream", "barrier"] = Field(
        default="stream",
        description="stream: a finished response goes to the judge at once; barrier: when all of its step are finished",
    )
    roles: Roles = Roles()
    planner: Planner = Planner()
