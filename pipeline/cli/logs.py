"""`logs`: what the processes and stage tasks of the newest attempt wrote, with control characters spelt out."""

import time
from collections.abc import Iterator
from pathlib import Path

import click

from pipeline.cli.runs import find_run, read_status
from pipeline.core.dag import STAGES
from pipeline.core.errors import ConfigError
from pipeline.run_folder import RunFolder
from pipeline.wording import visible

_POLL_S = 0.2
_STAGES = {stage.name: stage.role for stage in STAGES}


def logs(name: str, *, follow: bool, role: str | None, step: int | None) -> int:
    run = find_run(name)
    reader = _Reader()
    is_last_look = not follow
    while True:
        files = list(_files(run, role, step))
        if is_last_look and not files:
            raise ConfigError(f"{run.name} has no such logs: {_where(run)}")
        for path in files:
            reader.print_new(path, is_last_look)
        if is_last_look:
            return 0
        is_last_look = not read_status(run)["live"]
        time.sleep(0 if is_last_look else _POLL_S)


def _where(run: RunFolder) -> str:
    return str(run.logs((run.attempts() or [0])[-1]))


def _files(run: RunFolder, role: str | None, step: int | None) -> Iterator[Path]:
    """Logs of the newest attempt: those of processes, or with `step` those of its stage tasks."""
    attempt = (run.attempts() or [0])[-1]
    if step is not None:
        for path in _by_age(run.tasks(attempt).glob(f"*-{step}-*_log.out")):
            if role in (None, _STAGES.get(path.name.split("-")[0])):
                yield path
        return
    of_jobs = [*_by_age(run.jobs.glob("*_0_log.out")), *_by_age((run.path / "logs").glob("s*.log"))] if not role else []
    for path in [*of_jobs, run.path / "logs" / "controller.log", *_by_age(run.logs(attempt).glob("*.log"))]:
        if path.is_file() and (role is None or role in path.stem.split("-")):
            yield path


def _by_age(paths: Iterator[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: (path.stat().st_ctime_ns, path.name))


class _Reader:
    """Prints growing files, each piece under the name of its file."""

    def __init__(self) -> None:
        self._read: dict[Path, int] = {}
        self._last: Path | None = None

    def print_new(self, path: Path, to_the_end: bool) -> None:
        """What was added since the last call: whole lines, or `to_the_end` everything."""
        with open(path, "rb") as file:
            file.seek(self._read.get(path, 0))
            text = file.read()
        if not to_the_end:
            text = text[: text.rfind(b"\n") + 1]
        if not text:
            return
        self._read[path] = self._read.get(path, 0) + len(text)
        if path != self._last:
            click.secho(visible(f"==> {path.parent.name}/{path.name} <=="), bold=True)
            self._last = path
        click.echo(visible(text.decode(errors="replace").removesuffix("\n")))
