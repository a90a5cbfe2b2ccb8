"""What Slurm's clients print, as values. Pure: text in, frozen records out; ValueError for what is no answer.

An answer that is not understood must never look like "there is no such job", so nothing is skipped in silence: each
text begins with its header, each JSON with its list.

Shapes: Slurm 22.05 (openapi v0.0.38) and the later ones (data_parser v0.0.40 and up), where `job_state` is a list and
a number is `{"set": bool, "infinite": bool, "number": int}`.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SEPARATOR = "\x1f"
"""ASCII's own separator of fields; a job's name could hold it, so the name comes last."""
JOB_FORMAT = SEPARATOR.join(("%i", "%T", "%r", "%N", "%B", "%L", "%j"))
"""For `squeue -o`."""
STEP_FORMAT = SEPARATOR.join(("%i", "%N", "%M", "%j"))
"""For `squeue --steps -o`."""
NODE_FORMAT = SEPARATOR.join(("%N", "%T", "%E"))
"""For `sinfo -N -o`."""

ENDED = frozenset(
    ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")
)
"""Slurm's words for a job that is over. A preempted one that Slurm requeues is PENDING, never PREEMPTED for long."""
_HELD_STATES = frozenset(("REQUEUE_HOLD", "SPECIAL_EXIT"))
_PENDING = _HELD_STATES | {"PENDING", "REQUEUED", "REQUEUE_FED"}
_NOTHING = frozenset(("", "None", "none", "n/a", "N/A", "(null)"))
_HELD = re.compile(r"held|JobHold", re.IGNORECASE)
_JOB_LINE = re.compile(rf"[0-9]+(?:_[^{SEPARATOR}]+)?{SEPARATOR}")
_DURATION = re.compile(r"(?:(\d+)-)?(?:(\d+):)??(\d+):(\d+)")
_MARKS = "*~#!%$@^-+"
"""What Slurm appends to a node's state."""
_UNUSABLE = ("down", "drain", "fail", "error", "unknown", "future", "power", "reboot", "inval", "maint", "no_respond")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """What Slurm said about a job. `state` is its own word; `nodes` are those that it has (left).

    `id`: "17", of an array's element "17_3". `time_left_s`: until its limit, of a waiting job the whole limit; None
    without a limit. `restarts`: None where the answer does not tell.
    """

    id: str
    state: str
    reason: str = ""
    nodes: tuple[str, ...] = ()
    batch_host: str = ""
    time_left_s: float | None = None
    name: str = ""
    restarts: int | None = None
    is_completing: bool = False

    @property
    def is_ended(self) -> bool:
        """Slurm will do nothing more with it unless somebody requeues it. It says nothing of the run in it."""
        return self.state in ENDED and not self.is_completing

    @property
    def is_held(self) -> bool:
        """It waits for somebody to release it, and for nothing else."""
        return self.state in _HELD_STATES or (self.state == "PENDING" and bool(_HELD.search(self.reason)))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """What Slurm said about a node. `reason`: why an administrator or Slurm took it out of service."""

    name: str
    state: str
    is_answering: bool = True
    reason: str = ""

    @property
    def is_usable(self) -> bool:
        return self.is_answering and not self.state.startswith(_UNUSABLE)

    @property
    def is_draining(self) -> bool:
        """Its jobs may end by themselves, and then it is out of service."""
        return self.state.startswith("drain")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepState:
    """What Slurm said about a step (`id`: "17.2") that it believes to run, for `age_s`."""

    id: str
    name: str
    nodes: tuple[str, ...]
    age_s: float


def _rows(text: str, first: str, form: str, what: str) -> Iterator[list[str]]:
    """The fields of each line; `first` is the header's first word."""
    header, *lines = text.removesuffix("\n").split("\n")
    if not header.startswith(f"{first}{SEPARATOR}"):
        raise ValueError(f"not a list of {what}s: {text[:200]!r}")
    for line in lines:
        fields = line.split(SEPARATOR, form.count(SEPARATOR))
        if len(fields) != form.count(SEPARATOR) + 1:
            raise ValueError(f"not a {what}: {line[:200]!r}")
        yield fields


def parse_steps(text: str) -> dict[str, StepState]:
    """Of `squeue --steps -o STEP_FORMAT`, header included, by id."""
    found = {}
    for id, nodes, age, name in _rows(text, "STEPID", STEP_FORMAT, "step"):
        found[id] = StepState(id=id, name=name, nodes=expand_nodes(_text(nodes)), age_s=parse_duration(age) or 0.0)
    return found


def parse_jobs(text: str) -> dict[str, JobState]:
    """Of `squeue -o JOB_FORMAT`, header included, by id."""
    header, *lines = text.removesuffix("\n").split("\n")  # not splitlines: it splits at more than that
    if not header.startswith(f"JOBID{SEPARATOR}"):
        raise ValueError(f"not a list of jobs: {text[:200]!r}")
    found: dict[str, JobState] = {}
    for record in _records(lines):
        fields = record.split(SEPARATOR, JOB_FORMAT.count(SEPARATOR))
        if len(fields) != JOB_FORMAT.count(SEPARATOR) + 1:
            raise ValueError(f"not a job: {record[:200]!r}")
        id, state, reason, nodes, host, left, name = fields
        found[id] = JobState(
            id=id,
            state=state,
            reason=_text(reason),
            nodes=expand_nodes(_text(nodes)),
            batch_host=_text(host),
            time_left_s=None if state in ENDED else parse_duration(left),
            name=name,
            is_completing=state == "COMPLETING",
        )
    return found


def _records(lines: list[str]) -> Iterator[str]:
    """A name may hold line breaks: what is no beginning of a job goes on with the last one."""
    record: str | None = None
    for line in lines:
        if _JOB_LINE.match(line):
            if record is not None:
                yield record
            record = line
        elif record is None:
            raise ValueError(f"not a job: {line[:200]!r}")
        else:
            record += f"\n{line}"
    if record is not None:
        yield record


def parse_jobs_json(text: str, now: float) -> dict[str, JobState]:
    """Of `squeue --json`, by id. `now`: Unix time, for what is left of a job's limit."""
    try:
        answer = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error}): {text[:200]!r}") from None
    if not isinstance(answer, dict) or not isinstance(answer.get("jobs"), list) or answer.get("errors"):
        raise ValueError(f"not a list of jobs: {text[:200]!r}")
    jobs = [_job(job, now) for job in answer["jobs"]]
    return {job.id: job for job in jobs}


def _job(job: dict[str, Any], now: float) -> JobState:
    try:
        states = job["job_state"]
        first, *flags = [states] if isinstance(states, str) else states
        return JobState(
            id=_id(job),
            state=first,
            reason=_text(job.get("state_description")) or _text(job.get("state_reason")),
            nodes=expand_nodes(_text(job.get("nodes"))),
            batch_host=_text(job.get("batch_host")),
            time_left_s=_time_left_s(job, first, now),
            name=_text(job.get("name")),
            restarts=_number(job.get("restart_cnt")),
            is_completing="COMPLETING" in (first, *flags),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"not a job ({type(error).__name__}: {error}): {str(job)[:200]}") from None


def _id(job: dict[str, Any]) -> str:
    array, element, elements = _number(job.get("array_job_id")), _number(job.get("array_task_id")), ""
    if element is None:
        elements = _text(job.get("array_task_string"))
    if not array or (element is None and not elements):
        return str(job["job_id"])
    return f"{array}_[{elements}]" if elements else f"{array}_{element}"


def _time_left_s(job: dict[str, Any], state: str, now: float) -> float | None:
    limit_min = _number(job.get("time_limit"))
    if limit_min is None or state in ENDED:
        return None
    ends = _number(job.get("end_time"))
    return float(limit_min * 60) if state in _PENDING or not ends else max(0.0, ends - now)


def _number(value: Any) -> int | None:
    """None where it is not set, or infinite."""
    if isinstance(value, dict):
        value = value["number"] if value.get("set") and not value.get("infinite") else None
    return None if value is None else int(value)


def _text(value: str | None) -> str:
    return "" if value is None or value in _NOTHING else value


def parse_nodes(text: str) -> dict[str, NodeState]:
    """Of `sinfo -N -o NODE_FORMAT`, header included, by name (a node has a line for each of its partitions)."""
    found = {}
    for name, state, reason in _rows(text, "NODELIST", NODE_FORMAT, "node"):
        bare = state.rstrip(_MARKS)
        found[name] = NodeState(
            name=name, state=bare, is_answering="*" not in state[len(bare) :], reason=_text(reason.strip())
        )
    return found


def parse_duration(text: str) -> float | None:
    """Seconds of Slurm's `DAYS-HOURS:MINUTES:SECONDS`; None for UNLIMITED, INVALID and whatever else is no time."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def expand_nodes(text: str) -> tuple[str, ...]:
    """The nodes of a list as Slurm writes it: `n[1-3,07],login` are n1, n2, n3, n07, login."""
    found: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        names = [""]
        for literal, inside in re.findall(r"([^\[]+)|\[([^\]]*)\]", part):
            names = [name + piece for name in names for piece in ([literal] if literal else _range(inside))]
        found += names
    return tuple(found)


def _range(text: str) -> list[str]:
    found = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
    return found
