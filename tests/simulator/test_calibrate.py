"""A journal of an engine whose costs are known gives these costs back."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.core.events import Finish, SegmentClosed, SegmentInfo, TaskEnded, TaskStarted
from pipeline.journal import Journal
from pipeline.simulator.calibrate import SCHEDULE, calibrated
from pipeline.simulator.lengths import lognormal_mixture
from pipeline.simulator.profiles import GPUS, known_model
from pipeline.simulator.result import simulate
from pipeline.simulator.setup import Setup, Workload

ITERATION_S, SEQUENCE_S, START_S = 3e-3, 0.2e-3, 0.05
JUDGE_S, TOKEN_S, TRAIN_S, REST_S = 0.4, 1e-4, 0.02, 0.1
NUM_STEPS, NUM_SEQUENCES = 30, 64


def setup() -> Setup:
    tiny = known_model("qwen2.5-1.5b")
    work = Workload(
        num_prompts=8,
        num_each=8,
        rollout=lognormal_mixture([(1.0, 20.0, 0.6)], 80),
        verdict=lognormal_mixture([(1.0, 12.0, 0.3)], 40),
        prompt_tokens=10,
        template_tokens=20,
        shares_prefix=False,
        correlation=0.0,
    )
    return Setup(
        gpu=GPUS["h100"],
        num_gpus=3,
        policy=tiny,
        judge=tiny,
        rollout_gpus=1,
        reward_gpus=1,
        workload=work,
        gpus_per_node=3,
    )


def write_run(folder: Path, num_steps: int = NUM_STEPS) -> None:
    (folder / "journal").mkdir()
    journal, rows = Journal(folder / "journal/attempt_1.jsonl"), []
    rng, at = np.random.default_rng(4), 100.0
    for step in range(1, num_steps + 1):
        lengths = setup().workload.rollout.draw(rng, 8, 8).ravel().astype(int)
        task = f"rollout-{step}-1"
        journal.write(TaskStarted(task=task), at)
        now = at + START_S
        for iteration in range(int(lengths.max())):
            now += ITERATION_S + SEQUENCE_S * int((lengths > iteration).sum())
            ended = tuple(
                SegmentInfo(id=f"{step}-{i}", idx=0, num_tokens=iteration + 1, version=0, finish=Finish.STOP)
                for i in np.flatnonzero(lengths == iteration + 1)
            )
            if ended:
                journal.write(SegmentClosed(task=task, segments=ended), now)
        journal.write(TaskEnded(task=task, ok=True), now)
        train_s = TRAIN_S + TOKEN_S * int(lengths.sum())
        rows.append(
            {
                "step": step,
                "train/num_tokens": float(lengths.sum()),
                "timing_s/rollout": now - at,
                "timing_s/reward": JUDGE_S,
                "timing_s/train": train_s,
                "timing_s/step": now - at + JUDGE_S + train_s + REST_S,
            }
        )
        at = now + 1.0
    journal.close()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_known_costs_come_back(tmp_path: Path) -> None:
    write_run(tmp_path)
    measured = calibrated(setup(), tmp_path).measured
    assert measured is not None
    engine = measured.rollout.iteration
    assert engine.overhead_s == pytest.approx(ITERATION_S, rel=0.01)
    assert engine.per_sequence_s == pytest.approx(SEQUENCE_S, rel=0.01)
    assert engine.prefill_s * NUM_SEQUENCES * 10 == pytest.approx(START_S, rel=0.05)
    assert measured.train.fixed_s == pytest.approx(TRAIN_S + REST_S, rel=0.15)


def test_what_is_predicted_is_what_it_is_and_twice_of_it_what_it_would_be(tmp_path: Path) -> None:
    write_run(tmp_path)
    once = calibrated(setup(), tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert simulate(once, SCHEDULE).step_s == pytest.approx(np.median([r["timing_s/step"] for r in rows]), rel=0.05)
    twice = replace(once, workload=replace(once.workload, num_each=16))
    steps = simulate(twice, SCHEDULE).steps
    tokens = 128 * once.workload.rollout.mean
    rolled = np.median([(s.rolled_out_s or 0) - s.admitted_s for s in steps])
    # 128 sequences: twice the prefill, twice the tokens, and as many iterations as the longest has (at most 80).
    assert rolled == pytest.approx(2 * START_S + tokens * SEQUENCE_S + 77 * ITERATION_S, rel=0.05)


def test_a_short_run_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, num_steps=4)
    with pytest.raises(ValueError, match="4 steps are too few"):
        calibrated(setup(), tmp_path)
