"""`list`: the runs in a folder, each in a line."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from pipeline.cli.runs import DEFAULT_ROOT, how_it_stands, read_status
from pipeline.cli.show import progress
from pipeline.cli.terminal import table
from pipeline.core.errors import ConfigError
from pipeline.run_folder import RunFolder, read_json
from pipeline.wording import number, seconds

_HEAD = ("RUN", "STATUS", "STEP", "AGE", "REWARD", "ACCURACY", "FOLDER")
_DEPTH = 2
"""Folders between the one that is named and a run: `compare` puts its runs into one of their own."""
_TAIL_BYTES = 256 << 10
"""Of metrics.jsonl: the last rows, however long the run is."""


def list_runs(folder: str | None, as_json: bool) -> int:
    root = Path(folder) if folder else DEFAULT_ROOT
    if folder and not root.is_dir():
        raise ConfigError(f"no such folder: {root.absolute()}")
    found = [_facts(run) for run in sorted(_runs(root, _DEPTH), key=lambda run: run.config.stat().st_mtime)]
    if as_json:
        click.echo(json.dumps(found, indent=1))
    elif not found:
        click.echo(f"no runs in {root.absolute()}")
    else:
        click.echo(table([_HEAD, *map(_row, found)], indent=""))
    return 0


def _runs(folder: Path, depth: int) -> Iterator[RunFolder]:
    if str(folder.absolute()).isprintable() and (run := RunFolder(folder.absolute())).config.is_file():
        yield run
    elif depth >= 0 and folder.is_dir():
        for inner in folder.iterdir():
            if inner.is_dir() and not inner.is_symlink():
                yield from _runs(inner, depth - 1)


def _facts(run: RunFolder) -> dict[str, Any]:
    """`age_s`: since it was begun. `reward` is that of the last step, `accuracy` that of the last evaluation."""
    status = read_status(run)
    rows = _last_rows(run)
    summary = read_json(run.summary) or {}
    accuracy = _last(rows, "val/acc")
    return {
        "run": run.name,
        "status": how_it_stands(status),
        "live": status["live"],
        "step": status.get("step", 0),
        "total_steps": status.get("total_steps"),
        "progress": progress(status),
        "age_s": round(max(0.0, time.time() - run.config.stat().st_mtime), 1),
        "reward": _last(rows, "critic/score/mean"),
        "accuracy": accuracy if accuracy is not None else summary.get("eval_last"),
        "folder": str(run.path),
    }


def _row(facts: dict[str, Any]) -> tuple[str, ...]:
    return (
        facts["run"],
        facts["status"],
        facts["progress"],
        seconds(facts["age_s"]),
        number(facts["reward"]),
        number(facts["accuracy"]),
        facts["folder"],
    )


def _last_rows(run: RunFolder) -> list[dict[str, Any]]:
    try:
        with open(run.metrics, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines[1 if size > _TAIL_BYTES else 0 : -1]]


def _last(rows: list[dict[str, Any]], name: str) -> float | None:
    return next((value for row in reversed(rows) if (value := row.get(name)) is not None), None)
