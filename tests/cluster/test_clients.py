"""This package's clients and lookout against a real Slurm."""

import pytest

from pipeline.core.errors import SlurmError
from slurm.commands import Clients, outside_of_jobs
from slurm.lookout import Lookout
from tests.cluster import SlurmCluster

pytestmark = pytest.mark.slurm


def clients(cluster: SlurmCluster, timeout_s: float = 20, tries: int = 4) -> Clients:
    environment = outside_of_jobs(cluster.client_env | {"SQUEUE_PARTITION": "low", "SLURM_JOB_ID": "1"})
    return Clients(timeout_s=timeout_s, tries=tries, pause_s=0.2, environment=environment)


def test_text_and_json_tell_the_same_of_each_job(cluster: SlurmCluster) -> None:
    ids = {
        "running": cluster.submit("-N2", "--job-name", "a|b c", "-t", "7", "--wrap", "sleep 100"),
        "failed": cluster.submit("--wrap", "exit 3"),
        "waiting": cluster.submit("--begin=now+1hour", "-t", "5", "--wrap", "true"),
        "held": cluster.submit("--hold", "--wrap", "true"),
    }
    requeued = cluster.submit("-c1", "--requeue", "--wrap", "sleep 100")
    asked = clients(cluster)
    cluster.wait_until(lambda: cluster.jobs()[requeued] == cluster.jobs()[ids["running"]] == "RUNNING", "they run")
    cluster.client("scontrol", "requeuehold", requeued)
    cluster.wait_until(lambda: cluster.jobs()[requeued] == "PENDING", "it is requeued")
    cluster.wait_until(lambda: cluster.jobs()[ids["failed"]] == "FAILED", "it fails")
    text, full = asked.jobs(), asked.jobs_in_full()
    for id in (*ids.values(), requeued):
        said, more = text[id], full[id]
        assert said.restarts is None and more.restarts == (1 if id == requeued else 0)
        for name in ("state", "reason", "nodes", "batch_host", "name", "is_held", "is_ended", "is_completing"):
            assert getattr(said, name) == getattr(more, name), (id, name)
        assert (said.time_left_s is None) == (more.time_left_s is None)
        assert abs((said.time_left_s or 0) - (more.time_left_s or 0)) <= 3
    running = text[ids["running"]]
    assert (running.name, running.nodes, running.batch_host) == ("a|b c", ("n1", "n2"), "n1")
    assert {id for id in (*ids.values(), requeued) if text[id].is_held} == {ids["held"], requeued}
    assert text[requeued].reason == "job requeued in held state"


def test_what_changes_a_job(cluster: SlurmCluster) -> None:
    asked = clients(cluster)
    job = cluster.submit("--requeue", "--wrap", "srun --job-name=agent sleep 100")
    (step,) = cluster.wait_until(
        lambda: [step for step in asked.steps(job).values() if step.name == "agent"], "its step runs"
    )
    assert step.nodes == ("n1",) and step.age_s < 100
    asked.requeue(job)
    cluster.wait_until(lambda: asked.jobs()[job].state == "PENDING", "it waits again")
    asked.cancel(job)
    asked.cancel(job)
    asked.cancel("1")
    assert asked.jobs()[job].is_ended
    with pytest.raises(SlurmError, match="Invalid job id") as raised:
        asked.requeue("1")
    assert not raised.value.is_outage


def test_nodes_that_are_down(cluster: SlurmCluster) -> None:
    cluster.set_down("n2")
    nodes = clients(cluster).nodes()
    assert (nodes["n1"].is_usable, nodes["n2"].is_usable, nodes["n2"].reason) == (True, False, "test")


def test_the_death_of_slurmctld_ends_no_watched_job(cluster: SlurmCluster) -> None:
    job, gone = cluster.submit("--wrap", "sleep 100"), "1"
    cluster.wait_until(lambda: cluster.jobs()[job] == "RUNNING", "it runs")
    lookout = Lookout(clients(cluster, timeout_s=1), period_s=0.1, settle_s=0)
    lookout.watch(job)
    lookout.watch(gone)
    assert [lookout.look(id, at_once=True).state for id in (job, gone)] == ["RUNNING", "GONE"]
    cluster.kill_controller()
    seen = lookout.look(job, at_once=True)
    assert (seen.state, seen.is_gone) == ("UNKNOWN", False) and seen.silent_s is not None
    cluster.start_controller()
    cluster.wait_until(lambda: lookout.look(job).state == "RUNNING", "it is seen again")
