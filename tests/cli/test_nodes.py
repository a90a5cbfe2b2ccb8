"""Runs of several nodes by the command line: what the user sees when nodes go for good."""

import json
import os
import signal
from pathlib import Path

import pytest

from pipeline.run_folder import read_json
from tests.cli.conftest import Pivot
from tests.cli.test_deaths import events, leftovers
from tests.cli.test_full import ENDLESS
from tests.cli.test_submit import begin, metric_steps, step_of, until
from tests.scenarios.runs import pid_by_log

TWO_NODES = ("cluster.nodes=2", "cluster.slots_per_node=3", "limits.restarts=0")


def agent(run: Path, node: str) -> int:
    pid = pid_by_log(run, run / "logs" / "attempt_1" / f"{node}-agent.log")
    assert pid
    return pid


def are_observed(run: Path) -> bool:
    """Whether each agent reports what is planned, and the pids are those of the workers."""
    status = read_json(run / "status.json")
    logs = run / "logs" / "attempt_1"
    planned = {(w["node"], w["name"]): w["slots"] for w in status["workers"]}
    observed = {(node, name): one for node, ones in status["bindings"].items() for name, one in ones.items()}
    return {key: one["slots"] for key, one in observed.items()} == planned and all(
        pid_by_log(run, logs / f"{node}-{name}.log") == one["pid"] for (node, name), one in observed.items()
    )


def test_a_run_goes_on_with_the_nodes_that_are_left_and_says_which(pivot: Pivot, tmp_path: Path) -> None:
    run = tmp_path / "r"
    more = ("cluster.min_nodes=1", "placement.roles.rollout.replicas=3", "placement.roles.reward.replicas=2")
    process = begin(tmp_path, "submit", "configs/emulated.yaml", "--run-dir", str(run), *ENDLESS, *TWO_NODES, *more)
    until(lambda: step_of(run) >= 3 and len(read_json(run / "status.json")["workers"]) == 6, process)
    until(lambda: are_observed(run), process)
    lost = next(w["node"] for w in read_json(run / "status.json")["workers"] if w["name"] == "train-0")
    kept = ({"local-0", "local-1"} - {lost}).pop()
    os.kill(agent(run, lost), signal.SIGKILL)
    until(lambda: read_json(run / "status.json")["nodes"].get(lost) == "given up", process)
    reached = metric_steps(run)[-1] + 2
    until(lambda: metric_steps(run)[-1] >= reached, process)
    until(lambda: are_observed(run), process)
    workers = {w["name"]: w["node"] for w in read_json(run / "status.json")["workers"]}
    assert {"rollout-0", "reward-0", "train-0"} <= workers.keys() and set(workers.values()) == {kept}
    assert f"{lost} given up" in pivot("status", str(run)).out
    assert pivot("cancel", str(run)).code == 0
    process.communicate(timeout=60)
    assert metric_steps(run) == list(range(1, metric_steps(run)[-1] + 1))
    assert f"node {lost} is lost: its agent ended" in (run / "logs" / "controller.log").read_text()
    assert [event["version"] for event in events(run, "NodeJoined")] == [0, 0], "nothing began anew"
    assert leftovers(run) == []


@pytest.mark.parametrize("replication", [1, 2])
def test_a_run_whose_weights_are_dealt_among_nodes_outlives_the_loss_of_one_that_trains(
    pivot: Pivot, tmp_path: Path, replication: int
) -> None:
    """With an old checkpoint: what was trained since comes again from recorded batches."""
    run = tmp_path / "r"
    dealt = ("cluster.nodes=3", f"gps.replication={replication}", "checkpoint.save_freq=1000")
    process = begin(tmp_path, "submit", "configs/emulated.yaml", "--run-dir", str(run), *ENDLESS, *dealt)
    until(lambda: step_of(run) >= 2, process)
    until(lambda: nodes_of(run) == ["ready"] * 3, process)
    status = read_json(run / "status.json")
    assert [len(said["piles"]) for said in status["weights"]["nodes"].values()] == [replication] * 3
    lost = next(worker["node"] for worker in status["workers"] if worker["name"] == "train-0")
    os.kill(agent(run, lost), signal.SIGKILL)
    until(lambda: f"node {lost} is lost: its agent ended" in (run / "logs" / "controller.log").read_text(), process)
    reached = metric_steps(run)[-1] + 3
    until(lambda: metric_steps(run)[-1] >= reached and nodes_of(run) == ["ready"] * 3, process)
    said = pivot("gps", str(run)).out
    assert "PILES" in said, said
    assert pivot("cancel", str(run)).code == 0
    process.communicate(timeout=60)
    assert metric_steps(run) == list(range(1, metric_steps(run)[-1] + 1))
    assert leftovers(run) == []


def nodes_of(run: Path) -> list[str]:
    return list(read_json(run / "status.json")["nodes"].values())


def test_a_node_below_the_minimum_ends_the_run_with_its_cause(tmp_path: Path) -> None:
    run = tmp_path / "r"
    process = begin(tmp_path, "submit", "configs/emulated.yaml", "--run-dir", str(run), *ENDLESS, *TWO_NODES)
    until(lambda: step_of(run) >= 2 and len(read_json(run / "status.json")["nodes"]) == 2, process)
    os.kill(agent(run, "local-1"), signal.SIGKILL)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1, out
    assert "node local-1 was lost 1 times without progress: its agent ended: killed by SIGKILL" in out
    until(lambda: leftovers(run) == [])


def test_what_does_not_fit_into_the_fewest_nodes_is_refused_at_submit(pivot: Pivot, tmp_path: Path) -> None:
    refused = pivot("validate", "configs/emulated.yaml", "cluster.nodes=2", "cluster.min_nodes=1", "trainer.ranks=2")
    assert refused.code == 2 and "cluster.min_nodes" in refused.err and "4" in refused.err, refused.err


def test_the_status_file_names_the_nodes(pivot: Pivot, tmp_path: Path) -> None:
    run = tmp_path / "r"
    assert (
        pivot("submit", "configs/emulated.yaml", "--run-dir", str(run), "cluster.nodes=2", "trainer.ranks=2").code == 0
    )
    assert json.loads(pivot("status", str(run), "--json").out)["nodes"] == {"local-0": "ready", "local-1": "ready"}
