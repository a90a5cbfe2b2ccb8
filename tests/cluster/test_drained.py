"""A node that its administrator drains."""

import time
from pathlib import Path

import pytest

from tests.cluster import SlurmCluster
from tests.cluster.test_runs import LONG, end_well
from tests.scenarios.deaths import worked
from tests.scenarios.faults import SETTINGS
from tests.scenarios.jobs import JobRun, back, batch_host, other_node

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(200)]


@pytest.mark.slow
def test_a_node_that_is_drained_is_given_back_and_the_run_goes_on_smaller(cluster: SlurmCluster, folder: Path) -> None:
    smaller = ("trainer.ranks=1", "cluster.slots_per_node=4", "cluster.min_nodes=1")
    run = JobRun(folder / "r", cluster, *SETTINGS, *LONG, *smaller)
    run.until("it works", worked)
    job, node, host = run.job, other_node(run), batch_host(run)
    drained = time.time()
    cluster.drain(node)
    lost = run.until("it is given back", lambda e: e["event"] == "NodeLost" and e["is_gone"], drained)
    assert lost["node"] == node
    back(run, lost["wall"])
    cluster.wait_until(lambda: cluster.node_states()[node] == "drained", "nothing of the run is on it")
    assert (run.attempt, run.job) == (1, job)

    cluster.set_up(node)
    drained = time.time()
    cluster.drain(host)
    run.until("it works elsewhere", lambda e: e["event"] == "NodeJoined" and e["node"] == node, drained)
    back(run, time.time())
    cluster.wait_until(lambda: cluster.node_states()[host] == "drained", "nothing of the run is on it")
    assert run.attempt == 2 and run.job != job, "a new job, for the old one was on that node"
    end_well(run)
