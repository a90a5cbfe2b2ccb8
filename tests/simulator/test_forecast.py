"""From a configuration to a table of modes, and `pivot-pipeline simulate`."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config import load_files
from pipeline.core.errors import ConfigError
from pipeline.core.modes import ModeName
from pipeline.simulator.forecast import Candidate, best_of, candidates, forecast, setup_of
from pipeline.simulator.modes import static_schedules
from pipeline.simulator.result import Result, simulate
from pipeline.simulator.study import seconds_text, speed_text
from tests.cli.conftest import Pivot, pivot

__all__ = ["pivot"]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Models that are known by name, so there are no weights."""
    sections: dict[str, Any] = {
        "model": {"policy": {"path": "qwen2.5-7b"}, "genrm": {"path": "qwen3-30b-a3b"}},
        "cluster": {"kind": "local", "nodes": 2, "slots_per_node": 8},
        "data": {"train_files": str(tmp_path / "x.jsonl"), "train_batch_size": 4},
        "rollout": {"n": 4, "max_response_length": 2048},
        "reward": {"genrm": {"template": str(tmp_path / "judge.jinja"), "max_tokens": 512}},
        "trainer": {"total_training_steps": 1},
        "placement": {"roles": {"reward": {"slots": 4}}},
    }
    (tmp_path / "x.jsonl").write_text("{}\n")
    (tmp_path / "judge.jinja").write_text("{{ prompt }}{{ response }}")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(sections))
    return tmp_path / "run.yaml"


def test_a_configuration_becomes_a_setup(config: Path) -> None:
    setup = setup_of(load_files([config]), gpu="h20", num_gpus=32)
    assert (setup.num_gpus, setup.block, setup.rollout_gpus, setup.reward_gpus) == (32, 4, 1, 4)
    assert setup.policy.parameters == pytest.approx(7.6e9, rel=0.01) and setup.judge.num_experts == 128
    work = setup.workload
    assert (work.num_prompts, work.num_each, work.rollout.longest, work.verdict.longest) == (4, 4, 2048, 512)
    assert work.rollout.mean == pytest.approx(5561 / 8, rel=0.01)
    assert setup.recomputes_on_update


def test_lengths_may_be_named(config: Path) -> None:
    lengths = config.parent / "lengths"
    lengths.write_text("100\n300\n")
    assert setup_of(load_files([config]), gpu="h100", num_gpus=16, lengths=str(lengths)).workload.rollout.mean == 200
    with pytest.raises(ConfigError, match="no finished response"):
        setup_of(load_files([config]), gpu="h100", num_gpus=16, lengths=str(config.parent))


def test_what_cannot_be_simulated_is_refused(config: Path) -> None:
    other = load_files([config], ["model.policy.path=nowhere"])
    with pytest.raises(ConfigError, match=r"model\.policy\.path.*no config\.json.*qwen2\.5-7b"):
        setup_of(other, gpu="h100", num_gpus=16)
    with pytest.raises(ConfigError, match=r"no GPU 'tpu'; valid: a100"):
        setup_of(load_files([config]), gpu="tpu", num_gpus=16)
    with pytest.raises(ConfigError, match="hold no blocks of 4"):
        setup_of(load_files([config]), gpu="h100", num_gpus=18)


def test_a_model_that_a_replica_has_no_room_for_is_refused_with_the_key_to_change(config: Path) -> None:
    for role, which in (("rollout", "policy"), ("reward", "genrm")):
        large = [f"model.{which}.path=qwen2.5-72b", "placement.roles.reward.slots=1"]
        with pytest.raises(ConfigError, match=rf"145 GB .* 1 GPU of this kind.*placement\.roles\.{role}\.slots"):
            setup_of(load_files([config], large), gpu="h100", num_gpus=16)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"n_embd": 768}', r"lacks 'hidden_size'"),
        ('{"text_config": null, "hidden_size": 64}', r"lacks 'num_hidden_layers'"),
        ("[]", "describes no model"),
        ("{", "describes no model"),
    ],
)
def test_a_models_description_that_cannot_be_read_is_named(config: Path, text: str, why: str) -> None:
    folder = config.parent / "model"
    folder.mkdir()
    (folder / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"model\.policy\.path: .*config\.json {why}"):
        setup_of(load_files([config], [f"model.policy.path={folder}"]), gpu="h100", num_gpus=16)


def test_at_staleness_0_no_split_stands_twice(config: Path) -> None:
    """There no admission differs from another, and no two steps roll out together."""
    setup = setup_of(load_files([config]), gpu="h800", num_gpus=16)
    for staleness, admissions in ((0, {"16/16": 1}), (1, {"pairs 16/16": 1})):
        loaded = load_files([config], [f"algorithm.staleness={staleness}"])
        named = [c.schedule for mode in ModeName for c in candidates(loaded, setup, mode)]
        assert len(named) == len(set(named))
        assert {f"shiftable {text}": num for text, num in admissions.items()}.items() <= Counter(named).items()
        assert any("barrier" in name for name in named) == (staleness == 1)


def test_each_mode_comes_with_its_best_split(config: Path) -> None:
    coarse = ["placement.planner.num_steps=16", "placement.planner.tick_share=0.2"]
    loaded = load_files([config], ["algorithm.staleness=1", *coarse])
    setup = setup_of(loaded, gpu="h800", num_gpus=16)
    rows = forecast(loaded, setup, ModeName, 2)
    assert [row.mode for row in rows] == list(ModeName)
    for row in rows:
        assert row.sequences_per_s > 0 and 0 < row.idle < 1 and 0 < row.of_tail_bound < 1.2
        assert row.step_s == pytest.approx(16 / row.sequences_per_s, rel=0.05)
        assert sum(row.idle_by.values()) == pytest.approx(row.idle) and min(row.idle_by.values()) > -1e-3
    assert rows == forecast(loaded, setup, ModeName, 2)
    assert [row.staleness for row in rows] == [0, 1, 1, 1, 1]
    strict, barrier = (
        forecast(load_files([config], [f"placement.admission={a}", *coarse]), setup, ModeName, 2)
        for a in ("stream", "barrier")
    )
    assert {row.staleness for row in (*strict, *barrier)} == {0}
    assert rows[1].step_s < strict[1].step_s < barrier[1].step_s


def test_a_mode_that_is_not_among_the_static_ones_gets_a_row_too(config: Path) -> None:
    """Any text and any way to run it; its runs are averaged as theirs are."""
    setup = setup_of(load_files([config]), gpu="h800", num_gpus=16)
    schedule = static_schedules(setup)[0]
    seeds: list[int] = []

    def run(*, seed: int, is_traced: bool = False) -> Result:
        seeds.append(seed)
        return simulate(setup, schedule, seed=seed, is_traced=is_traced)

    row = best_of([Candidate(mode="shiftable", schedule="shiftable, train 16", staleness=0, run=run)], 3)
    assert row is not None and (row.mode, row.schedule, seeds) == ("shiftable", "shiftable, train 16", [0, 1, 2])
    each = [simulate(setup, schedule, seed=seed) for seed in range(3)]
    assert row.sequences_per_s == pytest.approx(sum(r.sequences_per_s for r in each) / 3)
    assert row.idle_by["shift"] == pytest.approx(sum(r.idle["shift"] for r in each) / 3) and row.idle_by["shift"] > 0
    assert best_of([], 3) is None


def test_training_that_does_not_fit_is_left_out(config: Path) -> None:
    large = load_files([config], ["model.policy.path=qwen2.5-72b", "placement.roles.rollout.slots=4"])
    found = forecast(large, setup_of(large, gpu="h200", num_gpus=16), ModeName, 1)
    # 14 bytes x 72.7e9 parameters are 64 GB on each of 16 GPUs of 141, and 127 GB on each of 8.
    assert [row.mode for row in found] == [ModeName.COLOCATED, ModeName.SHIFTABLE]


def test_the_command_prints_a_table_and_json(config: Path, pivot: Pivot) -> None:
    asked = pivot("simulate", str(config), "--modes", "colocated,disaggregated", "--gpus", "16,24", "--json")
    rows = json.loads(asked.out)
    assert [(r["gpus"], r["mode"]) for r in rows] == [
        (16, "colocated"),
        (16, "disaggregated"),
        (24, "colocated"),
        (24, "disaggregated"),
    ]
    assert all(set(r["idle_by"]) == {"rollout", "reward", "train", "shift"} for r in rows)
    assert rows[0]["shifts_per_step"] == pytest.approx(3, abs=0.1) and rows[1]["idle_by"]["shift"] == 0
    table = pivot("simulate", str(config), "--modes", "colocated").out.splitlines()
    assert table[0].split()[:2] == ["GPUS", "MODE,"] and table[1].split()[:3] == ["16", "colocated", "16/16"]
    large = ("model.policy.path=qwen2.5-72b", "placement.roles.rollout.slots=4")
    nothing = pivot("simulate", str(config), *large, "--gpu", "h100", "--gpus", "8").out
    assert "none fits: what training needs" in nothing.splitlines()[1]
    wrong = pivot("simulate", str(config), "--modes", "magic")
    assert wrong.code == 2 and "valid: all, or some of colocated" in wrong.err
    for wrong_number in ("many", "²", "8,"):
        assert pivot("simulate", str(config), "--gpus", wrong_number).code == 2
    twice = pivot("simulate", str(config), "--modes", "colocated, colocated", "--gpus", "16, 16").out.splitlines()
    assert sum(line.startswith("16 ") for line in twice) == 1
    one = ("placement.roles.reward.slots=1", "model.policy.path=qwen2.5-1.5b", "model.genrm.path=qwen2.5-1.5b")
    nothing = pivot("simulate", str(config), *one, "--modes", "disaggregated", "--gpus", "1").out
    assert "too few for a split" in nothing.splitlines()[1]


def test_slow_runs_are_told_too() -> None:
    assert [speed_text(speed) for speed in (12.345, 0.5, 0.0024)] == ["12.35", "0.50", "0.0024"]
    assert [seconds_text(seconds) for seconds in (0.1234, 12.34, 15974.3)] == ["0.123", "12.3", "15974"]
