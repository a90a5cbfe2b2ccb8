from pathlib import Path

import pytest

from pipeline.config import Config, load_files
from pipeline.core.errors import ConfigError
from pipeline.resume import check_changes
from pipeline.run_folder import RunFolder

STRICT = "run.determinism=strict"


def config(*overrides: str) -> Config:
    more = ["cluster.slots_per_node=9", "model.policy.dtype=float32", "model.genrm.dtype=float32"]
    return load_files(["configs/emulated.yaml"], [*more, *overrides])


def check(tmp_path: Path, before: list[str], after: list[str]) -> None:
    check_changes(RunFolder(tmp_path), config(*before), config(*after))


@pytest.mark.parametrize("before", ["single:1", "ddp:1", "ddp:3", "fsdp2:2"])
@pytest.mark.parametrize("after", ["single:1", "ddp:2", "fsdp2:4"])
def test_ranks_and_strategy_may_change_but_in_a_strict_run(tmp_path: Path, before: str, after: str) -> None:
    settings = [
        [f"trainer.strategy={strategy}", f"trainer.ranks={ranks}"]
        for strategy, _, ranks in (text.partition(":") for text in (before, after))
    ]
    check(tmp_path, *settings)
    if before == after:
        check(tmp_path, *([*change, STRICT] for change in settings))
        return
    with pytest.raises(ConfigError, match=r"trainer\.(strategy|ranks) from"):
        check(tmp_path, *([*change, STRICT] for change in settings))


@pytest.mark.parametrize("strategies", [("emulated", "ddp"), ("single", "emulated")])
def test_an_emulated_trainer_and_a_real_one_do_not_take_turns(tmp_path: Path, strategies: tuple[str, str]) -> None:
    before, after = ([f"trainer.strategy={strategy}"] for strategy in strategies)
    with pytest.raises(ConfigError, match=r"trainer\.strategy from .*: an emulated trainer has no real weights"):
        check(tmp_path, before, after)
    check(tmp_path, ["trainer.strategy=emulated"], ["trainer.strategy=emulated", "trainer.ranks=3"])
