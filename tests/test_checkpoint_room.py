"""Room on the disk for checkpoints: what one takes, and how many there will be."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.checkpoint_room import check_disk, checkpoint_bytes
from pipeline.config import Config, load_files
from pipeline.core.errors import ConfigError


def config(*settings: str) -> Config:
    return load_files(["quickstart.yaml"], settings)


def test_half_precision_keeps_the_whole_weights_beside() -> None:
    """About: each image has a header, and ends on a page."""
    full, half = checkpoint_bytes(config()), checkpoint_bytes(config("model.policy.dtype=bfloat16"))
    model = (Path("configs/quickstart/policy/model.safetensors")).stat().st_size
    assert full == pytest.approx(3 * model, rel=0.05) and half == pytest.approx(3.5 * model, rel=0.05)


def test_those_that_are_there_have_their_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = checkpoint_bytes(config())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2 * one))
    with pytest.raises(ConfigError, match=r"3 of .*checkpoint\.keep 2"):
        check_disk(config(), tmp_path)
    (tmp_path / "checkpoints" / "step_10").mkdir(parents=True)
    check_disk(config(), tmp_path)
    check_disk(config("checkpoint.keep=1"), tmp_path / "other")
    with pytest.raises(ConfigError, match="9 of"):
        check_disk(config("checkpoint.keep=9", f"checkpoint.uri={tmp_path}/checkpoints"), tmp_path / "other")
    check_disk(config("checkpoint.keep=9", "checkpoint.uri=s3://b/x"), tmp_path)
