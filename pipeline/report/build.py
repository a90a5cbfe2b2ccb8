"""The report of a run: what its folder says, on one page."""

import time
from collections.abc import Iterator, Sequence

from pipeline.core.events import Role
from pipeline.metrics import DROPPED, TRAINED
from pipeline.report import figures
from pipeline.report.advice import Advice, advise
from pipeline.report.facts import Facts, facts_of
from pipeline.report.measures import learning, length_table, slot_time, stage_time
from pipeline.report.page import Section, page
from pipeline.report.run import RunRecord, read_run
from pipeline.report.sample_list import failure_table, sample_list
from pipeline.report.shift_table import shift_table
from pipeline.report.spent import IDLE_CODES
from pipeline.report.tables import shown, table, words
from pipeline.report.troubles import troubles
from pipeline.run_folder import RunFolder
from pipeline.wording import number, seconds


def build(run: RunFolder, is_live: bool = False) -> str:
    """The page. Raises RunError for a damaged file of metrics."""
    record = read_run(run)
    facts = facts_of(record)
    steps = [(step.number, step.recorded - record.began) for step in record.timeline.steps.values()]
    steps = steps or [(step, (row["time"] or 0.0) - record.began) for step, row in record.rows.items()]
    return page(record.name, _head(record, facts, is_live), _sections(record, facts), sorted(steps))


def _sections(record: RunRecord, facts: Facts) -> Iterator[Section]:
    yield Section(id="advice", heading="What to change first", html=_advice(advise(facts)))
    yield Section(
        id="who-had-the-slots",
        heading="Slots",
        html="" if record.timeline.rows else "<p>This run has left no timeline of its slots.</p>",
        charts=[
            (
                "slots",
                figures.slots(record),
                "Who had which slot. Dark lines are shifts: point at one for what it was predicted and measured to "
                "gain. Drag to look closer, double-click for all; on the keyboard + - 0 and arrows.",
            ),
            (
                "throughput",
                figures.throughput(record),
                "Tokens per second of each role; of training, those it trained.",
            ),
            ("queues", figures.queues(record), "Sequences that run and wait."),
        ],
    )
    yield Section(
        id="time",
        heading="Time",
        html=slot_time(facts),
        charts=[
            ("spent", figures.spent(record), "What the slots did, step by step. The area of a colour is slot time."),
            ("stages", figures.stages(record), "When the stages of odd and of even steps ran."),
        ],
        below=stage_time(record),
    )
    yield Section(id="learning", heading="Learning", charts=list(learning(record)), is_abreast=True)
    yield Section(
        id="lengths",
        heading="Lengths",
        charts=[
            ("response-lengths", figures.lengths(record, Role.ROLLOUT), "How long responses were."),
            ("verdict-lengths", figures.lengths(record, Role.REWARD), "How long the judge's verdicts were."),
        ],
        below=length_table(facts),
    )
    yield Section(id="shifts", heading="Shifts", html=shift_table(record))
    yield Section(id="failures", heading="Judge failures", html=failure_table(record))
    yield Section(id="responses", heading="Samples", html=sample_list(record.samples))
    yield Section(id="environment", heading="Environment", html=_environment(record))
    yield Section(id="configuration", heading="Configuration", html=f"<pre>{shown(record.config_text)}</pre>")


def _head(record: RunRecord, facts: Facts, is_live: bool) -> str:
    summary, status = record.summary, record.status
    change = "{} ▶ {}"
    slots = len(record.timeline.rows)
    found = [
        ("status", "running" if is_live else str(status.get("status", "unknown"))),
        ("steps", f"{facts.num_steps} of {status.get('total_steps', '?')}"),
        ("time", seconds(record.wall_s)),
        ("mode", str(facts.mode or "-")),
        ("slots", str(slots) if slots else "-"),
        ("tokens/s", number(summary.get("tokens_per_s"), ",.0f")),
        ("a step", f"{number(facts.step_s, '.2f')} s"),
        ("idle", number(facts.spent("".join(IDLE_CODES)) if facts.slots else None, ".0%")),
        ("decisions to shift", str(facts.num_shifts)),
        ("reward", change.format(number(summary.get("reward_first")), number(summary.get("reward_last")))),
        ("accuracy", change.format(number(summary.get("eval_first")), number(summary.get("eval_last")))),
        ("sequences", f"{record.total(TRAINED):,.0f} trained, {record.total(DROPPED):,.0f} dropped"),
    ]
    items = "".join(f"<li><b>{shown(value)}</b>{shown(name)}</li>" for name, value in found)
    rows = [{"step": step, **row} for step, row in record.rows.items()]
    warned = troubles({**status, "live": is_live}, rows, time.time())
    lines = "".join(f'<p class="trouble">{shown(text)}</p>' for text in warned)
    return f'<ul class="facts">{items}</ul>{lines}'


def _advice(found: Sequence[Advice]) -> str:
    if not found:
        return "<p>Nothing that is wrong, and nothing that could win one part in twenty of the time, was found.</p>"
    items = "".join(
        f'<li>{_marked(one.change)}<br><span class="worth">{_worth(one)}</span> {_marked(one.evidence)}</li>'
        for one in found
    )
    return f'<ol class="advice">{items}</ol><p class="note">Percentages: of the time, what it could win at most.</p>'


def _worth(one: Advice) -> str:
    return "wrong" if one.worth is None else f"{one.worth:.0%}"


def _marked(text: str) -> str:
    """Keys of the configuration stand between backticks."""
    return "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(shown(text).split("`")))


def _environment(record: RunRecord) -> str:
    found = record.environment
    memory = found.get("memory_bytes")
    named = [
        ("run folder", record.name),
        ("attempts", str(record.num_attempts)),
        ("began", time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(record.began))),
        ("cluster", str(record.status.get("cluster", "-"))),
        ("nodes", ", ".join(record.status.get("nodes") or {}) or "-"),
        (
            "controller's host",
            f"{found.get('host', '-')}, {found.get('processor', '-')}, {found.get('cores', '-')} cores",
        ),
        ("memory", f"{memory / 2**30:.0f} GiB" if memory else "-"),
        ("GPUs", ", ".join(found.get("gpus") or []) or "none"),
        ("system", f"{found.get('system', '-')}, Python {found.get('python', '-')}"),
        ("commit", str(found.get("git_sha", "-"))),
        *(found.get("packages") or {}).items(),
    ]
    return table([], [[words(name), words(str(text))] for name, text in named])
