"""What lies in a run's folder for a report to read: plain files, none of which must be there."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pipeline.config import Config, load_resolved, without_secrets
from pipeline.core.errors import ConfigError, RunError
from pipeline.metrics import Row
from pipeline.report.timeline import Timeline, clock_offsets, read_timeline
from pipeline.run_folder import RunFolder, read_json
from pipeline.tracking import MetricsLog
from pipeline.watching.book import Line, read_book, read_lines
from pipeline.watching.decided import Decided, Decisions, read_decisions


@dataclass(frozen=True)
class RunRecord:
    """`rows`: metric rows by step, each with its `time`; `config` is None where the file is damaged, and `config_text`
    is then why."""

    name: str
    status: Mapping[str, Any]
    summary: Mapping[str, Any]
    rows: dict[int, Row]
    decided: Decisions
    timeline: Timeline
    samples: list[Line]
    config: Config | None
    config_text: str
    environment: Mapping[str, Any]
    inputs: Mapping[str, Any]
    num_attempts: int
    offsets: Mapping[int, float]
    """By attempt: see `clock_offsets`; of decisions and shifts."""

    @cached_property
    def trained(self) -> list[tuple[int, Row]]:
        """The rows of steps: without the evaluation before the first."""
        return [(step, row) for step, row in self.rows.items() if step > 0]

    @property
    def began(self) -> float:
        """Where the time axis begins, in seconds since the epoch."""
        if self.timeline.attempts:
            return self.timeline.began
        times = [at - (row.get("timing_s/step") or 0.0) for row in self.rows.values() if (at := row.get("time"))]
        return min(times, default=self.status.get("started", 0.0))

    @property
    def wall_s(self) -> float:
        return max([self.timeline.ended, *(row.get("time") or 0.0 for row in self.rows.values())]) - self.began

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """Of a metric: seconds of the time axis, and values, where there are some."""
        found = [(row["time"], value) for row in self.rows.values() if (value := row.get(name)) is not None]
        return [at - self.began for at, _ in found if at is not None], [value for at, value in found if at is not None]

    def total(self, name: str) -> float:
        return sum(row.get(name) or 0.0 for row in self.rows.values())

    def mean(self, name: str, last: int | None = None) -> float | None:
        """Over steps; `last`: the last so many."""
        values = [value for _, row in self.trained if (value := row.get(name)) is not None]
        values = values[-last:] if last else values
        return sum(values) / len(values) if values else None

    def wall(self, line: Line, name: str = "at") -> float:
        """A time of a line of decisions.jsonl, on the time axis."""
        at: float = line[name]
        return at + self.offsets.get(line["attempt"], 0.0) - self.began

    @property
    def shifting(self) -> list[Decided]:
        """The decisions that moved something."""
        return [decided for decided in self.decided.decisions if decided.line["moves"]]


def read_run(run: RunFolder) -> RunRecord:
    """Raises RunError for a damaged file of metrics."""
    config, text = _config(run)
    timeline = list(read_book(run.timeline))
    offsets = clock_offsets([*timeline, *read_book(run.decisions)])
    return RunRecord(
        name=run.name,
        status=read_json(run.status) or {},
        summary=read_json(run.summary) or {},
        rows=dict(MetricsLog(run.metrics).rows()),
        decided=read_decisions(run.decisions),
        timeline=read_timeline(timeline, offsets),
        samples=list(read_lines(run.judge_samples)),
        config=config,
        config_text=text,
        environment=read_json(run.environment) or {},
        inputs=read_json(run.inputs) or {},
        num_attempts=len(run.attempts()),
        offsets=offsets,
    )


def _config(run: RunFolder) -> tuple[Config | None, str]:
    try:
        config = load_resolved(run.config)
    except (ConfigError, RunError, OSError, json.JSONDecodeError) as error:
        return None, str(error)
    return config, without_secrets(config)
