import os
from dataclasses import fields, replace
from pathlib import Path

import pytest

from pipeline import config as c
from pipeline.core.errors import ConfigError
from pipeline.core.planner.settings import DEFAULT

BASE = """
model: {policy: {path: emulated}, genrm: {path: emulated}}
data: {train_files: train.jsonl}
reward: {genrm: {template: "{{ response }}"}}
trainer: {total_training_steps: 3}
"""


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A valid file, in a folder that is not the working directory."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    path = tmp_path / "conf" / "run.yaml"
    path.parent.mkdir()
    path.write_text(BASE)
    return path


def load(base: Path, *overrides: str) -> c.Config:
    return c.load_files([base], overrides)


def problems(base: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(base, *overrides)
    return str(caught.value).split("\n  ")[1:]


# --- R40 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.learning_rat=1e-5", ["trainer.learning_rat", "1e-05", "did you mean trainer.lr?"]),
        ("trainer.weight_decai=0", ["trainer.weight_decai", "did you mean trainer.weight_decay?"]),
        ("data.lr=1", ["data.lr", "lr belongs under trainer"]),
        ("lr=1", ["lr belongs under trainer"]),
        ("trainer.save_freq=1", ["save_freq belongs under checkpoint"]),
        ("rollout.max_tokens=1", ["max_tokens belongs under reward.genrm"]),
        ("train.lr=1", ["did you mean trainer?"]),
        ("trainer.learning_rate=1", ["did you mean trainer.lr?"]),
        ("algorithm.kl_loss_coef=1", ["did you mean algorithm.kl.coef?"]),
        ("rollout.qqqq=1", ["rollout.qqqq", "no such key", "temperature"]),
        ("reward.genrm.verdict.maker=x", ["did you mean reward.genrm.verdict.marker?"]),
    ],
)
def test_r40_an_unknown_key_is_named_with_its_section_and_the_nearest_name(
    base: Path, override: str, words: list[str]
) -> None:
    (problem,) = problems(base, override)
    assert all(word in problem for word in words), problem


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.lr=fast", ["trainer.lr", "'fast'", "a number > 0"]),
        ("trainer.lr=true", ["trainer.lr", "True", "a number > 0"]),
        ("trainer.lr=-1", ["-1", "a number > 0"]),
        ("trainer.lr=.nan", ["nan", "a number > 0"]),
        ("trainer.lr=", ["trainer.lr", "''", "a number > 0"]),
        ("rollout.n=2.5", ["2.5", "a whole number >= 2"]),
        ("rollout.n=null", ["nothing", "a whole number >= 2"]),
        ("data.shuffle=1", ["true or false"]),
        ("data.shuffle=yes", ["'yes'", "true or false"]),
        ("run.name=5", ["run.name", "5", "text"]),
        ("run.name=a/b", ["run.name", "a/b", "without '/'"]),
        ("cluster.kind=slrum", ["did you mean slurm?", "local or slurm"]),
        ("trainer.betas=[0.9]", ["trainer.betas", "a list of 2, each a number >= 0 and < 1"]),
        ("trainer.betas=[0.9, 1]", ["trainer.betas.1", "1", "< 1"]),
        ("trainer=3", ["trainer", "3", "a section with keys of"]),
        (
            "reward.genrm.verdict.choices={a: x}",
            ["verdict.choices.a", "a mapping of names, each to a number"],
        ),
        ("reward.genrm.verdict.minimum=2", ["reward.genrm.verdict", "minimum 2.0 is not below maximum 1.0"]),
        ("placement.roles.train.slots=2", ["4 slots", "the cluster has 3"]),
        ("trainer.ranks=2", ["trainer.ranks 2 needs trainer.strategy ddp or fsdp2, not single"]),
        ("trainer.strategy=dpp", ["trainer.strategy", "did you mean ddp?"]),
        ("placement.roles.train.replicas=2", ["train.replicas is 2, must be 1", "trainer.ranks", "train.slots"]),
        ("cluster.min_nodes=2", ["cluster.min_nodes 2 exceeds cluster.nodes 1"]),
        ("trainer.updates_per_step=17", ["updates_per_step 17", "train_batch_size 16"]),
        ("placement.planner.schedule={step: 1}", ["placement.planner.schedule (override)", "a list, each a section"]),
    ],
)
def test_r40_a_wrong_value_is_named_with_what_is_valid(base: Path, override: str, words: list[str]) -> None:
    (problem,) = problems(base, override)
    assert all(word in problem for word in words), problem


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["cluster.slots_per_node=3"], ["want 4 slots", "the cluster has 3"]),
        (["cluster.slots_per_node=6", "placement.roles.train.slots=3"], ["want 8 slots", "the cluster has 6"]),
        (
            ["cluster.nodes=3", "cluster.slots_per_node=3", "cluster.min_nodes=1"],
            ["cluster.min_nodes 1", "are 3 slots", "all trainer.ranks want 4"],
        ),
    ],
)
def test_each_rank_has_its_slots(base: Path, overrides: list[str], words: list[str]) -> None:
    ranks = ["trainer.ranks=2", "trainer.strategy=ddp"]
    (problem,) = problems(base, *ranks, *overrides)
    assert all(word in problem for word in words), problem
    assert load(base, *ranks, *overrides, "cluster.slots_per_node=8").trainer.ranks == 2


@pytest.mark.parametrize(
    ("shifts", "words"),
    [
        (["{step: 0, at: judged, blocks: [0], role: reward}"], [".0.step (override): given 0", "whole number >= 1"]),
        (["{step: 1, at: judgd, blocks: [0], role: reward}"], [".0.at", "did you mean judged?", "rolled_out"]),
        (["{step: 1, at: judged, blocks: [], role: reward}"], [".0.blocks", "each a whole number that is not empty"]),
        (["{step: 1, at: judged, blocks: [x], role: reward}"], [".0.blocks.0", "a list, each a whole number"]),
        (["{step: 1, at: judged, blocks: [0], role: train}"], [".0.role", "'train'", "rollout or reward"]),
        (["{step: 1, at: judged, blocks: [0], role: reward, blokk: 1}"], [".0.blokk", "valid here: at, blocks, role"]),
        (["{step: 1, at: judged, blocks: [3], role: reward}"], [".0.blocks names 3", "0 to 2"]),
        (["{step: 1, at: judged, blocks: [-1], role: reward}"], [".0.blocks names -1", "0 to 2"]),
        (["{step: 4, at: judged, blocks: [0], role: reward}"], [".0.step is 4", "1 to 3"]),
        (
            ["{step: 1, at: judged, blocks: [0], role: reward}", "{step: 1, at: judged, blocks: [0], role: rollout}"],
            [".1 gives block 0 to rollout, 0 to reward at the same moment"],
        ),
    ],
)
def test_a_wrong_shift_by_hand_is_named_with_what_is_valid(base: Path, shifts: list[str], words: list[str]) -> None:
    by_hand = ["placement.mode=shiftable", "placement.planner.enabled=false"]
    (problem,) = problems(base, *by_hand, f"placement.planner.schedule=[{', '.join(shifts)}]")
    assert all(word in problem for word in words), problem


@pytest.mark.parametrize("mode", ["shiftable", "colocated", "trainer_pool"])
def test_a_rank_lies_within_one_block_where_it_shares_its_slots(base: Path, mode: str) -> None:
    """Else nobody knew of those who are awake on the rest of its slots."""
    blocks = ["cluster.slots_per_node=8", "placement.roles.rollout.slots=2", f"placement.mode={mode}"]
    (problem,) = problems(base, *blocks, "placement.roles.train.slots=4")
    assert "placement.roles.train.slots is 4" in problem
    assert "blocks of 2" in problem
    assert "valid is 1 or 2" in problem
    load(base, *blocks, "placement.roles.train.slots=2")
    load(base, *blocks, "placement.roles.train.slots=4", "placement.mode=rollout_reward_colocated")


def test_a_schedule_that_nobody_would_read_is_refused(base: Path) -> None:
    schedule = "placement.planner.schedule=[{step: 1, at: judged, blocks: [0], role: reward}]"
    (problem,) = problems(base, schedule, "placement.mode=shiftable")
    assert "placement.planner.schedule needs placement.planner.enabled: false" in problem
    (problem,) = problems(base, schedule, "placement.mode=colocated", "placement.planner.enabled=false")
    assert "placement.planner.schedule is only for placement.mode shiftable, not colocated" in problem


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "emulated"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_any_number_of_ranks_fits_a_strategy_that_knows_ranks(base: Path, strategy: str, ranks: int) -> None:
    more = [f"trainer.strategy={strategy}", f"trainer.ranks={ranks}", "cluster.nodes=2", "cluster.slots_per_node=6"]
    config = load(base, *more, "cluster.min_nodes=1", "placement.roles.rollout.replicas=4")
    assert (config.trainer.ranks, config.trainer.strategy) == (ranks, strategy)


def test_r40_everything_wrong_is_said_at_once_with_its_source(base: Path) -> None:
    base.write_text(BASE.replace("total_training_steps: 3", "total_steps: 3"))
    found = problems(base, "rollout.n=1")
    assert len(found) == 3
    assert any("trainer.total_steps (run.yaml)" in p and "trainer.total_training_steps?" in p for p in found)
    assert any(p.startswith("trainer.total_training_steps: is required") for p in found)
    assert any("rollout.n (override)" in p for p in found)


def test_r40_text_numbers_are_read_by_the_schema_wherever_they_stand(base: Path) -> None:
    config = load(
        base,
        "trainer.lr='1e-6'",
        "trainer.betas=['9e-1', '0.95']",
        "reward.genrm.verdict.choices={right: '1e0', wrong: '-5e-1'}",
        "rollout.n='8'",
        "trainer.total_training_steps=1e3",
        "limits.save_s=30",
    )
    assert config.trainer.lr == 1e-6 and config.trainer.betas == (0.9, 0.95)
    assert config.reward.genrm.verdict.choices == {"right": 1.0, "wrong": -0.5}
    assert config.rollout.n == 8 and config.trainer.total_training_steps == 1000
    assert type(config.trainer.total_training_steps) is int and type(config.limits.save_s) is float


def test_words_of_a_verdict_are_never_booleans(base: Path) -> None:
    assert load(base, "reward.genrm.verdict.choices={yes: 1, no: 0}").reward.genrm.verdict.choices == {
        "yes": 1,
        "no": 0,
    }


# --- composing -------------------------------------------------------------------------------------------------------


def test_files_compose_from_left_to_right_and_overrides_win(base: Path) -> None:
    second = base.with_name("second.yaml")
    second.write_text("trainer: {lr: 1e-4, grad_clip: 2}\nrollout: {n: 4}")
    config = c.load_files([base, second], ["trainer.lr=1e-3", "trainer.lr=1e-2"])
    assert (config.trainer.lr, config.trainer.grad_clip, config.trainer.total_training_steps) == (1e-2, 2.0, 3)
    assert config.rollout.n == 4


def test_a_missing_file_names_the_packaged_ones(base: Path) -> None:
    named = r"nowhere\.yaml.*configs/placement/shiftable\.yaml.*configs/quickstart\.yaml"
    with pytest.raises(ConfigError, match=named):
        c.load_files(["nowhere.yaml"])


# --- paths -----------------------------------------------------------------------------------------------------------


def test_a_relative_path_is_looked_for_here_then_beside_the_file_then_among_the_packaged(base: Path) -> None:
    packaged = c.packaged_configs() / "emulated" / "train.jsonl"
    base.write_text(BASE.replace("train.jsonl", "emulated/train.jsonl"))
    assert load(base).data.train_files == [str(packaged)]
    beside = base.parent / "emulated" / "train.jsonl"
    beside.parent.mkdir()
    beside.touch()
    assert load(base).data.train_files == [str(beside)]
    here = Path.cwd() / "emulated" / "train.jsonl"
    here.parent.mkdir()
    here.touch()
    assert load(base).data.train_files == [str(here)]


def test_paths_become_absolute_and_urls_stay(base: Path) -> None:
    config = load(base, "data.val_files=[s3://b/v.jsonl, gone.jsonl]", "run.code_path=code", "checkpoint.uri=saved")
    here = os.getcwd()
    assert config.data.val_files == ["s3://b/v.jsonl", f"{here}/gone.jsonl"]
    assert config.run.code_path == [f"{here}/code"]
    assert (config.run.root, config.checkpoint.uri) == (f"{here}/runs", f"{here}/saved")
    assert config.model.policy.path == "emulated"
    assert load(base, "checkpoint.uri=s3://b/c").checkpoint.uri == "s3://b/c"


def test_a_template_is_given_as_text_or_as_a_file(base: Path) -> None:
    assert load(base).reward.genrm.template == "{{ response }}"
    (base.parent / "judge.jinja").write_text("Is {{ response }} right?\n")
    base.write_text(BASE.replace('"{{ response }}"', "judge.jinja"))
    assert load(base).reward.genrm.template == "Is {{ response }} right?\n"
    with pytest.raises(ConfigError, match=r"reward\.genrm\.template: no such file: gone\.jinja"):
        load(base, "reward.genrm.template=gone.jinja")


def test_the_tracking_uri_of_the_environment_is_taken_at_submit(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(base).tracking.uri == ""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://host:5000")
    assert load(base).tracking.uri == "http://host:5000"
    assert load(base, "tracking.uri=none").tracking.uri == "none"
    assert load(base, "tracking.uri=sqlite:///m.db").tracking.uri == f"sqlite:///{os.getcwd()}/m.db"


def test_packaged_configs_are_found_from_anywhere(base: Path) -> None:
    assert c.find_config("configs/emulated.yaml") == c.packaged_configs() / "emulated.yaml"
    assert c.find_config("emulated.yaml") == c.packaged_configs() / "emulated.yaml"
    config = c.load_files(["configs/emulated.yaml"])
    assert Path(config.data.train_files[0]).is_file() and config.is_emulated


# --- saving ----------------------------------------------------------------------------------------------------------


def test_the_resolved_configuration_needs_nothing_of_where_it_was_made(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(base, "trainer.betas=[1e-6, 0.5]", 'run.name="1e5"', "rollout.engine.options={a: [1, x], b: 'no'}")
    c.save_resolved(config, tmp_path / "config.yaml")
    base.unlink()
    monkeypatch.chdir("/")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://other")
    assert c.load_resolved(tmp_path / "config.yaml") == config
    with pytest.raises(ConfigError, match=r"resolved\.yaml"):
        c.load_resolved(tmp_path / "resolved.yaml")


def test_secrets_are_not_shown(base: Path) -> None:
    config = load(
        base, "cluster.env={HF_TOKEN: hunter2, LANG: C}", "tracking.uri=https://me:hunter2@host/x", "run.seed=7"
    )
    text = c.without_secrets(config)
    assert "hunter2" not in text
    assert "LANG: C" in text and "seed: 7" in text and "https://***@host/x" in text


# --- the planner ------------------------------------------------------------------------------------------------------


def test_the_planners_settings_are_those_of_the_core(base: Path) -> None:
    """One place holds the defaults; what only an ablation switches is no user's business."""
    planner = load(base).placement.planner
    assert planner.settings() == DEFAULT
    settings = {field.name for field in fields(DEFAULT)} - {"is_penalized", "horizon_s"}
    assert set(type(planner).model_fields) - {"enabled", "schedule"} == settings
    assert all(field.description for field in type(planner).model_fields.values())


def test_a_users_setting_reaches_the_planner(base: Path) -> None:
    changed = load(base, "placement.planner.epsilon=0.05", "placement.planner.min_dwell_s=3").placement.planner
    assert changed.settings() == replace(DEFAULT, epsilon=0.05, min_dwell_s=3.0)
    assert "placement.planner.epsilon" in problems(base, "placement.planner.epsilon=1.5")[0]
    for never_ends in ("tick_s=1e-6", "tick_s=1e9", "min_dwell_s=1e9"):
        assert "placement.planner." in problems(base, f"placement.planner.{never_ends}")[0]
    assert "did you mean" in problems(base, "placement.planner.epsilonn=1")[0]
