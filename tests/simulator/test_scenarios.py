"""What goes wrong in a simulated run, as it is written on the command line."""

from pathlib import Path

import pytest

from pipeline.config import load_files
from pipeline.core.errors import ConfigError
from pipeline.core.modes import ModeName
from pipeline.simulator.cluster import LostNode, SlowGpu
from pipeline.simulator.forecast import forecast, setup_of
from pipeline.simulator.scenarios import scenario_of
from tests.simulator.test_forecast import config as config
from tests.simulator.test_simulation import small


def test_scenarios_are_read() -> None:
    assert scenario_of("lost:1@300", small()) == LostNode(node=1, at_s=300.0)
    assert scenario_of("lost:0@7.5+60", small()) == LostNode(node=0, at_s=7.5, back_after_s=60.0)
    assert scenario_of("slow:3*1.5", small()) == SlowGpu(gpu=3, factor=1.5)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lost:2@300", "no node 2; valid: 0 to 1"),
        ("slow:16*2", "no GPU 16; valid: 0 to 15"),
        ("slow:3*0.5", "valid: 1 or more"),
        ("lost:1", r"valid: lost:NODE@SECONDS"),
        ("slow:-1*2", r"slow:GPU\*FACTOR"),
    ],
)
def test_a_scenario_that_cannot_be_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        scenario_of(text, small())


def test_what_goes_wrong_slows_all_modes_down_and_ends_those_that_cannot_go_on(config: Path) -> None:
    loaded = load_files([config], ["algorithm.staleness=1"])
    setup = setup_of(loaded, gpu="h800", num_gpus=16)
    modes = [ModeName.COLOCATED, ModeName.SHIFTABLE]
    well = forecast(loaded, setup, modes, 1)
    slow = forecast(loaded, setup, modes, 1, [SlowGpu(gpu=0, factor=3.0)])
    assert all(a.sequences_per_s > 1.05 * b.sequences_per_s for a, b in zip(well, slow, strict=True))
    nodes = range(-(-setup.num_gpus // setup.gpus_per_node))
    assert forecast(loaded, setup, modes, 1, [LostNode(node=node, at_s=1.0) for node in nodes]) == []
