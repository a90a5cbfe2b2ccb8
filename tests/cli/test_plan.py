"""`plan`: of a configuration and of a run, as text and as JSON."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import load_files, save_resolved
from pipeline.core.events import TaskEnded
from pipeline.core.snapshot import Snapshot
from pipeline.journal import Journal
from pipeline.run_folder import RunFolder, write_json
from pipeline.simulator.choice import choice_of
from tests.cli.conftest import CHECKOUT, Pivot
from tests.fakes.plan import Odds, make_plan
from tests.fakes.watched import Run as Watched
from tests.fakes.watched import foretell, live_through
from tests.fakes.world import World
from tests.simulator.test_calibrate import write_run
from tests.simulator.test_forecast import config

__all__ = ["config"]

COARSE = ("placement.planner.num_steps=16", "placement.planner.tick_share=0.2", "algorithm.staleness=1")


def test_plan_tells_what_is_chosen_and_what_the_planner_would_do(config: Path, pivot: Pivot) -> None:
    done = pivot("plan", str(config), *COARSE, "--gpu", "h800")
    assert done.code == 0, done.err
    assert "GPUs train" in done.out and "on 16 H800" in done.out and "static schedule" in done.out
    assert "The planner of shiftable" in done.out and "ROLLOUT/REWARD/TRAIN" in done.out
    assert len([line for line in done.out.splitlines() if "▶" in line.split()[:1]]) == 2, done.out
    told = json.loads(pivot("plan", str(config), *COARSE, "--gpu", "h800", "--version", "2", "--json").out)
    choice = choice_of(told["choice"])
    assert (told["gpu"], told["gpus"]) == ("h800", 16) and choice.schedule in choice.predicted
    moment = told["moment"]
    assert moment["snapshot"]["version"] == 2 and moment["reason"]
    assert Snapshot.from_json(json.dumps(moment["snapshot"])).staleness == 1
    assert all(c["rollout"] + c["reward"] <= 16 for c in moment["candidates"])


def test_a_static_choice_without_another_tells_no_gain(config: Path, pivot: Pivot) -> None:
    """Nodes of 8, so 8 or 12 of 12 GPUs may train: the states fit on 12 only."""
    large = ("model.policy.path=qwen2.5-72b", "placement.roles.rollout.slots=4")
    done = pivot("plan", str(config), *large, "--gpus", "12", "--gpu", "h200")
    assert done.code == 0, done.err
    assert "colocated 12/12" in done.out and "no other static schedule fits" in done.out


def test_plan_refuses_what_fits_nowhere(config: Path, pivot: Pivot) -> None:
    large = ("model.policy.path=qwen2.5-72b", "placement.roles.rollout.slots=4")
    done = pivot("plan", str(config), *large, "--gpus", "8", "--gpu", "h100")
    assert done.code == 2 and "does not fit into 8 GPUs" in done.err
    assert pivot("plan", str(config), "--gpu", "tpu").code == 2


# --- a run ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """Its first attempt is what costs are read off, its second, of 4 steps of 64 responses, what is looked at."""
    run = RunFolder(tmp_path / "runs" / "r")
    run.path.mkdir(parents=True)
    write_run(run.path)
    rows = [json.loads(line) | {"prompt_length/mean": 10.0} for line in run.metrics.read_text().splitlines()]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run.create()
    for _ in range(2):
        run.begin_attempt()
    verdicts: dict[str, Any] = {"genrm/num_verdicts": 64.0, "genrm/num_tokens": 64.0 * 13}
    first = Journal(run.journal(1))
    first.write(TaskEnded(task="reward-30-2", ok=True, result=verdicts), 1e5)
    first.close()
    world = World(make_plan(sequences_per_step=64, total_steps=4, evaluate_freq=0), random.Random(1), Odds(flush=0.2))
    second = Journal(run.journal(2))
    for at, event in world.start().run().events:
        second.write(event, at)
    second.close()
    settings = (
        "placement.admission=barrier",
        "data.train_batch_size=8",
        "rollout.n=8",
        "rollout.max_response_length=80",
    )
    steps = ("trainer.total_training_steps=4", "evaluate.freq=0", "checkpoint.save_freq=2")
    save_resolved(load_files([CHECKOUT / "configs/emulated.yaml"], [*settings, *steps]), run.config)
    write_json(run.status, {"run": "r", "status": "done", "attempt": 2, "pid": 1 << 22, "pid_start": 5})
    return run


def test_plan_of_a_run_replays_it_to_a_moment_and_says_that_nothing_is_shifted(run: RunFolder, pivot: Pivot) -> None:
    done = pivot("plan", "r")
    assert done.code == 0, done.err
    assert "under way: step 4, of 64 responses" in done.out and "as measured in the run" in done.out
    assert "Nothing is shifted: placement.mode is disaggregated." in done.out
    told = json.loads(pivot("plan", "r", "--version", "2", "--json").out)
    seen = Snapshot.from_json(json.dumps(told["moment"]["snapshot"]))
    assert (told["run"], told["mode"], seen.version) == ("r", "disaggregated", 2)
    assert seen.rollout.cost.overhead_s == pytest.approx(3e-3, rel=0.1), "as the first attempt had it"
    assert pivot("plan", "r", "--at", "nan").code == 2
    for too_late in (("--version", "9"), ("--at", "1e9")):
        done = pivot("plan", "r", *too_late)
        assert done.code == 2 and "the attempt" in done.err


def test_a_run_that_does_not_tell_enough_is_named_with_what_helps(run: RunFolder, pivot: Pivot) -> None:
    known = ("--gpu", "h100")
    assert "emulated holds no config.json" in pivot("plan", "r", *known).err
    text = run.config.read_text()
    run.config.write_text(text.replace("total_training_steps: 4", "total_training_steps: 1"))
    assert "r: its journal does not fit its config.yaml" in pivot("plan", "r", "--version", "4").err
    run.config.write_text(text)
    rows = run.metrics.read_text().splitlines()
    run.metrics.write_text("\n".join(rows[:4]) + "\n")
    done = pivot("plan", "r")
    assert done.code == 2 and "too few to calibrate from" in done.err and "valid: later, or --gpu" in done.err
    run.metrics.write_text('{"step": 1, "pro')
    assert "r: a line of its metrics.jsonl is no JSON" in pivot("plan", "r").err
    run.metrics.unlink()
    assert "metrics.jsonl: No such file" in pivot("plan", "r").err
    run.config.write_text(text.replace("admission: barrier", "admission: stream"))
    assert "placement.admission=barrier" in pivot("plan", "r").err
    run.journal(2).unlink()
    done = pivot("plan", "r")
    assert done.code == 2 and "no journal yet" in done.err


# --- a run whose GPUs change hands ------------------------------------------------------------------------------------


def test_plan_of_a_shiftable_run_tells_what_was_decided_and_what_it_was_worth(tmp_path: Path, pivot: Pivot) -> None:
    """Its journal is what a watcher writes."""
    told = Watched(tmp_path / "runs" / "s", "placement.mode=shiftable", decide=foretell)
    save_resolved(told.watcher._config, told.run.config)
    write_json(told.run.status, {"run": "s", "status": "done", "attempt": 1, "pid": 1 << 22, "pid_start": 5})
    empty = pivot("plan", "s")
    assert empty.code == 0 and "asked   0 times" in empty.out, empty.err
    live_through(told)
    told.lines("worth")
    done = pivot("plan", "s")
    assert done.code == 0, done.err
    assert "s, done: shiftable" in done.out and "asked   1 times, and shifted 1 times" in done.out
    assert "shift 1 to reward: foretold" in done.out and "2/2/0" in done.out and "+6.00" in done.out
    assert (
        "rollout ▶ reward" in done.out
        and "decision 9" in done.out
        and "2.00 s (tasks 1.50 s, release 400 ms)" in done.out
    )
    found = json.loads(pivot("plan", "s", "--json").out)
    (decision,), shifts = found["decisions"], found["shifts"]
    assert found["mode"] == "shiftable" and decision["shifts"] == shifts and len(shifts) == 1
    assert decision["worth"]["regret_s"] == decision["worth"]["predicted_gain_s"] - decision["worth"]["measured_gain_s"]
    assert decision["cost"] == {"predicted_s": 1.0, "measured_s": 5.0 / 4}
    refused = pivot("plan", "s", "--version", "1")
    assert refused.code == 2 and "change hands" in refused.err
