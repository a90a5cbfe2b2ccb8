"""`cluster.slurm`: how the one job that holds a run's nodes is asked for."""

import math
import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from pipeline.config_types import Int, Section

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<rest>\d+(?::\d+){0,2})")
_LINE = re.compile(r"[^\n\r\x00]*")
_OPTION = re.compile(r"[a-z][a-z0-9-]*")
_OURS = (
    *("nodes", "no-kill", "requeue", "no-requeue", "signal", "output", "error", "open-mode", "job-name", "array"),
    *("ntasks", "ntasks-per-node", "wrap", "chdir", "export", "get-user-env"),
)
_TEXTS = ("partition", "account", "qos", "time", "gres", "mem", "constraint", "exclude", "container")


def time_s(text: str) -> float | None:
    """Seconds of a time limit as sbatch takes it; None for what is none."""
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return math.inf
    found = _TIME.fullmatch(text)
    if found is None:
        return None
    days, parts = found["days"], [int(part) for part in found["rest"].split(":")]
    if days is not None:  # days-hours[:minutes[:seconds]]
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    else:  # minutes, minutes:seconds or hours:minutes:seconds
        hours, minutes, seconds = parts if len(parts) == 3 else (0, *parts, 0)[:3]
    return int(days or 0) * 86400.0 + hours * 3600 + minutes * 60 + seconds


class Slurm(Section):
    """Empty text: the option is not given, so the site's default holds."""

    partition: str = Field(default="", description="As sbatch takes it")
    account: str = Field(default="", description="As sbatch takes it")
    qos: str = Field(default="", description="As sbatch takes it")
    time: str = Field(default="", description="Time limit of the job, as sbatch takes it (24:00:00)")
    gres: str = Field(
        default="gpu", description="What a slot is: gpu, gpu:a100; empty on a partition without GPUs (a slot is a CPU)"
    )
    launcher: Literal["agent", "step"] = Field(
        default="agent", description="Who starts workers: their node's agent, or Slurm, each as a step of its own"
    )
    cpus_per_slot: Int = Field(default=4, ge=1, description="CPUs that are asked for with each slot")
    mem: str = Field(default="0", description="Memory per node; 0: all of it")
    constraint: str = Field(default="", description="Features that nodes must have, as sbatch takes it")
    exclude: str = Field(default="", description="Nodes that are not to be used (n3,n[7-9])")
    signal_s: Int = Field(default=120, ge=1, description="So long before the time limit the run saves and leaves")
    grace_s: Int = Field(default=30, ge=1, description="What the site gives between a job's TERM and its KILL")
    max_requeues: Int = Field(default=100, ge=0, description="Without preemptions; after so many it waits for `resume`")
    setup: list[str] = Field(default=[], description="Shell lines of the job before all else (modules, environments)")
    container: str = Field(default="", description="Put before each command of the job (apptainer exec --nv image.sif)")
    extra: dict[str, str] = Field(default={}, description="Other options of sbatch, by long name (empty: no value)")

    @field_validator(*_TEXTS, mode="before")
    @classmethod
    def _is_text(cls, value: object) -> object:
        """YAML takes an account or an amount of memory for a number."""
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @field_validator(*_TEXTS)
    @classmethod
    def _is_one_line(cls, value: str) -> str:
        if not _LINE.fullmatch(value):
            raise ValueError("must be one line")
        return value

    @field_validator("time")
    @classmethod
    def _is_time(cls, value: str) -> str:
        if value and time_s(value) is None:
            raise ValueError(f"{value!r} is no time limit; sbatch takes 30 (minutes), 1:30:00, 2-12:00:00 or UNLIMITED")
        return value

    @model_validator(mode="after")
    def _leaves_time_to_work(self) -> "Slurm":
        limit = time_s(self.time)
        if limit is not None and limit <= self.signal_s:
            raise ValueError(
                f"time {self.time} is {limit:g} s, and the run saves and leaves signal_s {self.signal_s} s before its "
                "end: no step would be left; valid is more"
            )
        return self

    @field_validator("extra", mode="before")
    @classmethod
    def _are_texts(cls, extra: object) -> object:
        """YAML takes a value for a number, and `true` for what has none."""
        if not isinstance(extra, dict):
            return extra
        flags = {name: "" for name, value in extra.items() if value is True}
        return extra | {name: str(value) for name, value in extra.items() if type(value) is int} | flags

    @field_validator("extra")
    @classmethod
    def _are_options(cls, extra: dict[str, str]) -> dict[str, str]:
        for name, value in extra.items():
            if not _OPTION.fullmatch(name) or not _LINE.fullmatch(value):
                raise ValueError(f"{name!r}: {value!r} is no long option of sbatch with a value of one line")
            if name in _OURS:
                raise ValueError(f"{name} is set by the run itself")
        return extra
