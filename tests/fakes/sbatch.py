"""Slurm's clients as scripts on the PATH, and a run that would be submitted by them."""

import os
from pathlib import Path

import pytest

from pipeline.config import Config, load_files, save_resolved
from pipeline.run_folder import RunFolder

CONFIG = str(Path(__file__).parents[2] / "configs/emulated.yaml")


def write_clients(bin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sbatch keeps its environment and the script in the folder, and gives it number 17."""
    bin.mkdir()
    for name, text in (("srun", "exit 1"), ("sbatch", f'env > {bin}/env; cp "$1" {bin}/script; echo Submitted job 17')):
        write_client(bin, name, text)
    monkeypatch.setenv("PATH", f"{bin}:{os.environ['PATH']}")


def write_client(bin: Path, name: str, text: str) -> None:
    (bin / name).write_text(f"#!/bin/sh\n{text}\n")
    (bin / name).chmod(0o700)


def make(tmp_path: Path, *overrides: str, name: str = "my run") -> tuple[RunFolder, Config]:
    config = load_files([CONFIG], ["cluster.kind=slurm", f"run.root={tmp_path}", *overrides])
    run = RunFolder(tmp_path / name)
    run.create()
    save_resolved(config, run.config)
    return run, config


def options(text: str) -> dict[str, str]:
    """What a script asks of sbatch."""
    rows = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    return {name: value for name, _, value in (row.partition("=") for row in rows)}
