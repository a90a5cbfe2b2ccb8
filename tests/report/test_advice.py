"""What to change first: each rule speaks when it should, with its evidence, and is silent when it should."""

import re
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from pipeline.config import Config
from pipeline.core.events import Role
from pipeline.core.modes import ModeName
from pipeline.report.advice import advise
from pipeline.report.facts import Facts

QUIET: dict[str, Any] = {
    "mode": ModeName.SHIFTABLE,
    "staleness": 1,
    "is_streaming": True,
    "num_steps": 50,
    "slots": {"R": 0.5, "J": 0.4, "T": 0.08, "X": 0.02},
    "stages": {"rollout": 0.8, "reward": 0.7, "train": 0.2, "publish": 0.02},
    "tail": 0.01,
    "lengths": {Role.ROLLOUT: (100.0, 400.0)},
    "clipped": 0.02,
    "judge_failures": {"timeout": 0.001},
    "false_positives": 0.05,
    "dropped": 0.0,
    "groups_used": 0.8,
    "kv_use": {Role.ROLLOUT: 0.5},
    "waiting": {Role.ROLLOUT: 3.0},
    "num_shifts": 40,
    "predicted_gain_s": 2.0,
    "measured_gain_s": 1.5,
    "num_weighed": 30,
    "step_s": 20.0,
    "nonfinite": 0.0,
    "num_attempts": 1,
}
STATIC = {"mode": ModeName.DISAGGREGATED}
RULES: list[tuple[dict[str, Any], str, str]] = [
    ({"judge_failures": {"timeout": 0.01, "truncated": 0.04}}, "reward.genrm.max_tokens", "5.0% of the responses"),
    ({"judge_failures": {"timeout": 0.04}}, "reward.genrm.timeout_s", "`timeout`"),
    ({"judge_failures": {"unheard of": 0.04}}, "samples of failures", "`unheard of`"),
    ({"false_positives": 0.4}, "another judge", "40% of the answers"),
    ({"nonfinite": 3.0}, "trainer.lr", "3 updates were skipped"),
    ({"num_attempts": 5}, "checkpoint.save_freq", "begun 5 times"),
    ({"clipped": 0.2}, "rollout.max_response_length", "20% of the responses"),
    ({"groups_used": 0.4}, "rollout.n", "40% of the groups"),
    ({"kv_use": {Role.ROLLOUT: 0.95}}, "rollout.engine", "95% full, with 3 sequences"),
    ({"slots": {"R": 0.6, "t": 0.4}, **STATIC}, "placement.mode: shiftable", "train 40%"),
    ({"slots": {"R": 0.6, "j": 0.4}, **STATIC, "is_streaming": False}, "placement.admission", "40% of all slots"),
    ({"slots": {"R": 0.6, "r": 0.4}, "staleness": 0}, "algorithm.staleness: 1", "rollout 40%"),
    ({"slots": {"R": 0.6, "r": 0.4}}, "data.train_batch_size", "40% of the slots' time was idle"),
    ({"slots": {"R": 0.6, "r": 0.4}, "mode": ModeName.COLOCATED, "staleness": 0}, "placement.mode: shiftable", "40%"),
    ({"tail": 0.3}, "rollout.max_response_length", "over 400 tokens, the median has 100"),
    ({"tail": 0.3, "staleness": 0}, "algorithm.staleness: 1", "30% of the time"),
    ({"tail": 0.3, "lengths": {Role.ROLLOUT: (100.0, 4000.0)}}, "more prompts per step", "a long tail"),
    ({"slots": {"R": 0.8, "X": 0.2}}, "placement.planner.min_dwell_s", "20% of the slots' time went into 40"),
    ({"measured_gain_s": -0.7}, "placement.mode: disaggregated", "+2.00 s each, and measured to gain -0.70 s"),
    ({"stages": {"evaluate": 0.3}}, "evaluate.freq", "`evaluate` ran for 30%"),
    ({"stages": {"save_checkpoint": 0.1}}, "checkpoint.save_freq", "10%"),
    ({"stages": {"queue": 0.1}}, "faster disk", "10%"),
    ({"stages": {"control": 0.1}}, "quieter host", "10%"),
    ({"stages": {"publish": 0.1}}, "new weights", "10%"),
    ({"slots": {"R": 0.8, "S": 0.2}}, "pivot-pipeline logs", "20%"),
]


def test_a_run_without_fault_needs_no_change() -> None:
    assert advise(Facts(**QUIET)) == []


@pytest.mark.parametrize(
    ("changed", "change", "evidence"), RULES, ids=lambda found: found if isinstance(found, str) else ""
)
def test_a_rule_names_the_key_and_its_evidence(changed: dict[str, Any], change: str, evidence: str) -> None:
    found = advise(Facts(**(QUIET | changed)))
    assert any(change in one.change and evidence in one.evidence for one in found), found


def test_what_is_wrong_comes_first_and_then_what_could_win_most() -> None:
    changed = {"nonfinite": 1.0, "tail": 0.3, "stages": {"evaluate": 0.1, "queue": 0.2}}
    found = advise(Facts(**(QUIET | changed)))
    assert [one.worth for one in found] == [None, 0.3, 0.2, 0.1]


def test_few_decisions_say_nothing_of_the_planner() -> None:
    assert advise(Facts(**(QUIET | {"measured_gain_s": -9.0, "num_weighed": 3}))) == []


def test_a_run_of_which_little_is_known_needs_no_change() -> None:
    nothing = {"tail", "clipped", "false_positives", "groups_used", "predicted_gain_s", "measured_gain_s", "step_s"}
    changed = dict.fromkeys(nothing | {"mode", "staleness"}) | {"slots": {}, "stages": {}, "lengths": {}, "kv_use": {}}
    assert advise(Facts(**(QUIET | changed))) == []


def test_the_keys_that_are_named_are_keys_of_the_configuration() -> None:
    named = set()
    for changed, _, _ in RULES:
        for one in advise(Facts(**(QUIET | changed))):
            named |= {key.split(":")[0] for key in re.findall(r"`([a-z_]+\.[a-z_.]+(?:: \S+)?)`", one.change)}
    assert len(named) > 12
    for key in named:
        model: Any = Config
        for part in key.split("."):
            assert part in model.model_fields, key
            kind = model.model_fields[part].annotation
            inner = [found for found in (kind, *get_args(kind)) if isinstance(found, type)]
            model = next((found for found in inner if issubclass(found, BaseModel)), None)
