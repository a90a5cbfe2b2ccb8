"""What goes wrong in a simulated run, from a command line: `lost:1@300+60` or `slow:3*1.5`."""

import re

from pipeline.core.errors import ConfigError
from pipeline.simulator.cluster import LostNode, SlowGpu
from pipeline.simulator.setup import Setup

_NUMBER = r"\d+(?:\.\d+)?"
_LOST = re.compile(rf"lost:(\d+)@({_NUMBER})(?:\+({_NUMBER}))?")
_SLOW = re.compile(rf"slow:(\d+)\*({_NUMBER})")


def scenario_of(text: str, setup: Setup) -> LostNode | SlowGpu:
    """Raises ConfigError for another form, and for a node or a GPU that the setup does not have."""
    if found := _LOST.fullmatch(text):
        node, at, back = found.groups()
        _check(text, "node", int(node), -(-setup.num_gpus // setup.gpus_per_node))
        return LostNode(node=int(node), at_s=float(at), back_after_s=float(back) if back else None)
    if found := _SLOW.fullmatch(text):
        gpu, factor = found.groups()
        _check(text, "GPU", int(gpu), setup.num_gpus)
        if float(factor) < 1:
            raise ConfigError(f"--scenario {text}: a slow GPU takes a multiple of the time; valid: 1 or more")
        return SlowGpu(gpu=int(gpu), factor=float(factor))
    raise ConfigError(
        f"--scenario {text}: valid: lost:NODE@SECONDS, lost:NODE@SECONDS+SECONDS (until another comes), slow:GPU*FACTOR"
    )


def _check(text: str, what: str, index: int, num: int) -> None:
    if index >= num:
        raise ConfigError(f"--scenario {text}: there is no {what} {index}; valid: 0 to {num - 1}")
