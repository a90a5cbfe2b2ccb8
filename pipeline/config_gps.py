"""Settings of the weight store."""

from pydantic import Field

from pipeline.config_types import Int, Section


class Gps(Section):
    budget: Int = Field(
        default=0,
        ge=0,
        description="Bytes of shared memory that a node may give to weights: two versions of the policy and the judge. "
        "Checked at submit; 0: as much as is free",
    )
    replication: Int = Field(
        default=0,
        ge=0,
        description="On how many nodes each tensor is; others read it from there when a replica is started, wakes or "
        "takes a new version. 0: on every node",
    )
    pin: bool = Field(
        default=False,
        description="On GPUs: engines register the weights' memory with the driver when they start, which takes "
        "seconds, and read it faster",
    )
