"""Whole runs whose data and checkpoints are on an object store."""

import json
import time
from pathlib import Path

import fsspec

from pipeline.checkpoint import Checkpoint, CheckpointStore
from tests.fakes.s3 import S3Server
from tests.scenarios.conftest import SETTINGS
from tests.scenarios.runs import ROOT, begin, checkpoints, killed_run, measured, sequences

_LIMIT_S = 60.0


def test_r11_a_run_on_an_object_store_is_killed_and_goes_on_bit_for_bit(
    reference: Path, tmp_path: Path, s3: S3Server
) -> None:
    data, uri = f"s3://bucket{tmp_path}/train.jsonl", f"s3://bucket{tmp_path}/checkpoints"
    fs = fsspec.filesystem("s3")
    fs.put_file(str(ROOT / "configs/emulated/train.jsonl"), data.removeprefix("s3://"))
    run = tmp_path / "run"
    # the save of step 6 ends before its manifest: the attempt after it begins with step 3
    killed = killed_run(
        run, "checkpoint.before_manifest:2:run", *SETTINGS, f"data.train_files=[{data}]", f"checkpoint.uri={uri}"
    )
    assert killed == 2

    store = CheckpointStore(uri)
    assert store.complete() == [3, 6] and not list((run / "checkpoints").iterdir())
    files = {f"step_{step}": Checkpoint(store.path(step)).files for step in (3, 6)}
    mine = {step: {name: entry["sha256"] for name, entry in found.items()} for step, found in files.items()}
    assert mine == checkpoints(reference)
    assert sequences(run) == sequences(reference)
    assert measured(run) == measured(reference)


def test_a_store_that_stalls_ends_the_run_in_time_with_its_url(tmp_path: Path, s3: S3Server) -> None:
    uri, run = f"s3://bucket{tmp_path}/checkpoints", tmp_path / "run"
    settings = ("trainer.total_training_steps=1000", "checkpoint.save_freq=5", "limits.save_s=3")
    process = begin(
        *("submit", "configs/emulated.yaml", "--run-dir", str(run), "--wait"), *settings, f"checkpoint.uri={uri}"
    )
    try:
        deadline = time.monotonic() + _LIMIT_S
        while CheckpointStore(uri).newest_complete().step == 0:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        s3.stall()
        began = time.monotonic()
        out, _ = process.communicate(timeout=_LIMIT_S)
        took = time.monotonic() - began
    finally:
        s3.go_on()
        process.kill()
        process.wait()
    ended = json.loads((run / "ENDED").read_text())
    assert process.returncode == 1 and ended["status"] == "failed"
    assert uri in ended["reason"] and "limits.save_s (3 s)" in ended["reason"], ended
    assert uri in out and took < 20
