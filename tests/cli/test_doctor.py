"""`doctor`: what it says of a machine, and of a configuration there."""

import json

from tests.cli.conftest import Pivot


def test_of_a_configuration_it_says_whether_it_is_valid_here(pivot: Pivot) -> None:
    done = pivot("doctor", "configs/emulated.yaml", "--json")
    found = {one["what"]: one for one in json.loads(done.out)}
    assert found["configuration"]["state"] == "ok" and found["own packages"]["state"] == "ok"
    done = pivot("doctor", "configs/emulated.yaml", "model.policy.path=gone")
    assert done.code == 1 and "model.policy.path: no such folder" in done.out and "what to do:" in done.out
