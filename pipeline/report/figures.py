"""The charts of one run. Each takes its record; None where the run has left nothing to draw it from."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from pipeline.core.events import INFERENCE, Role
from pipeline.report.charts import TIME, Bars, Curve, Lines, Mark, Stack, Stretches
from pipeline.report.looks import DARK, GREY, PINK, RED, ROLE_LOOKS, SKY, Look
from pipeline.report.run import RunRecord
from pipeline.report.spent import slot_seconds
from pipeline.report.timeline import bounded
from pipeline.watching.book import Line
from pipeline.watching.decided import Decided
from pipeline.watching.history import BINS_PER_OCTAVE
from pipeline.watching.slots import DOINGS
from pipeline.wording import number, seconds

_MOST_CHANGES = 60_000
"""Of all slots: some hundred kilobytes."""
_MOST_MARKS = 10_000
_MOST_BARS = 400
"""Stretches of a stack: more are narrower than can be seen."""
WORDS = {
    "R": "rollout",
    "J": "reward",
    "T": "train",
    "E": "evaluate",
    "P": "publish",
    "C": "save",
    "L": "load weights",
    "X": "shift",
    "S": "start",
    "r": "rollout, idle",
    "j": "reward, idle",
    "t": "train, idle",
    ".": "nobody",
}
LOOKS = {
    "R": ROLE_LOOKS[Role.ROLLOUT],
    "J": ROLE_LOOKS[Role.REWARD],
    "T": ROLE_LOOKS[Role.TRAIN],
    "E": Look(SKY, hatch="|"),
    "P": Look(PINK, hatch="-"),
    "C": Look(DARK, hatch="/"),
    "L": Look(PINK, hatch="|"),
    "X": Look(RED, hatch="x"),
    "S": Look(GREY, hatch="x"),
    "r": Look("#cfe3f1"),
    "j": Look("#f8e6bf", hatch="/"),
    "t": Look("#bfe7dc", hatch="\\"),
    ".": Look("#eeeeee"),
}
"""By code of `pipeline.watching.slots`. Idle: the colour of the role, nearly white."""
_GROUPS = {
    "rollout": "RrEL",
    "reward": "Jj",
    "train": "TtPC",
    "shift": "X",
    "start": "S",
}
_STAGES = {
    "prompts": "S",
    "rollout": "R",
    "reward": "J",
    "train": "T",
    "publish": "P",
    "evaluate": "E",
    "batch": "L",
    "record": "L",
}


def slots(record: RunRecord) -> Stretches | None:
    """Who had which slot, with all shifts."""
    rows, began = bounded(record.timeline.rows, _MOST_CHANGES), record.began
    if not rows:
        return None
    places = {row.name: i for i, row in enumerate(rows)}
    numbers = {id(decided): i for i, decided in enumerate(record.shifting)}
    of_shift = {id(shift): numbers[id(d)] for d in record.shifting for shift in d.shifts}
    shifts = [shift for shift in record.decided.shifts if shift["old"] and shift.get("slots")]
    return Stretches(
        rows=[(row.name, [(a - began, b - began, code) for a, b, code in row.spans()]) for row in rows],
        words=WORDS,
        looks=LOOKS,
        groups=_GROUPS,
        axis=TIME,
        marks=[
            Mark(
                at=record.wall(shift, "begun"),
                until=record.wall(shift, "begun") + (shift["took_s"] or 0.0),
                rows=[places[name] for name in shift["slots"] if name in places],
                text=_told(shift),
                note=of_shift.get(id(shift), -1),
            )
            for shift in shifts[-_MOST_MARKS:]
        ],
        notes=[tell_decision(decided) for decided in record.shifting],
        row_height=16 if len(rows) <= 16 else 11 if len(rows) <= 48 else 6,
    )


def _told(shift: Line) -> str:
    parts = [f"{name} {seconds(found['all'])}" for name in ("down", "up") if "all" in (found := shift[f"{name}_s"])]
    took = shift["failure"] or (seconds(shift["took_s"]) if shift["took_s"] is not None else "not ended")
    halves = f" ({', '.join(parts)})" if parts else ""
    return f"{shift['old']} ▶ {shift['new'] or 'nobody'}: {took}{halves}"


def tell_decision(decided: Decided) -> str:
    """What was decided, and what that was predicted and measured to be worth."""
    line, worth, chosen = decided.line, decided.worth, decided.chosen
    predicted, measured = decided.cost_s
    moved = Counter(line["moves"].values())
    words = " and ".join(f"{num * line['block_slots']} slots to {role}" for role, num in moved.items())
    gain = number(chosen["gain_s"] if chosen else None, "+.2f")
    seen = number(worth["measured_gain_s"] if worth else None, "+.2f")
    cost = f"{number(predicted, '.2f')} s predicted, {number(measured, '.2f')} s measured"
    return (
        f"decision {line['number']}, step {line['step']}, {line['cause'] or 'a tick'}: {words}\n"
        f"gain {gain} s predicted, {seen} s measured\ncost {cost}"
    )


def throughput(record: RunRecord) -> Lines | None:
    """Tokens per second by role; of training: those of a step's batch, while it is trained."""
    began, timeline = record.began, record.timeline
    times = [at - began for at in timeline.load_times]
    curves = {
        role.value: Curve(x=times, y=timeline.loads[role].tokens_per_s, look=ROLE_LOOKS[role]) for role in INFERENCE
    }
    x: list[float] = []
    y: list[float] = []
    for step, row in record.trained:
        spans = timeline.steps[step].spans if step in timeline.steps else []
        for stage, start, end in spans:
            if stage == "train" and end > start and (tokens := row.get("perf/total_num_tokens")) is not None:
                x += [start - began, end - began]
                y += [tokens / (end - start), 0.0]
    curves[Role.TRAIN.value] = Curve(x=x, y=y, look=ROLE_LOOKS[Role.TRAIN], holds=True)
    found = {name: curve for name, curve in curves.items() if len(curve.x) > 1}
    return Lines(curves=found, axis=TIME, unit="tokens/s", low=0.0, height=200) if found else None


def queues(record: RunRecord) -> Lines | None:
    timeline = record.timeline
    times = [at - record.began for at in timeline.load_times]
    if len(times) < 2:
        return None
    looks = {"run": ROLE_LOOKS, "wait": {Role.ROLLOUT: Look(SKY, (2, 2)), Role.REWARD: Look(RED, (8, 2))}}
    curves = {
        f"{role.value}: {word}": Curve(x=times, y=values, look=looks[word][role])
        for role in INFERENCE
        for word, values in (("run", timeline.loads[role].running), ("wait", timeline.loads[role].waiting))
    }
    return Lines(curves=curves, axis=TIME, unit="sequences", low=0.0)


def stages(record: RunRecord) -> Stretches | None:
    """When each stage of each step ran: two rows each, for odd steps and for even ones, which overlap."""
    began = record.began
    rows: dict[str, list[tuple[float, float, str]]] = {}
    for step in sorted(record.timeline.steps.values(), key=lambda step: step.recorded):
        for stage, start, end in step.spans:
            if stage in _STAGES and stage not in ("batch", "record"):
                name = f"{stage}, {'odd' if step.number % 2 else 'even'}"
                rows.setdefault(name, []).append((start - began, end - began, _STAGES[stage]))
    if not rows:
        return None
    order = [f"{stage}, {parity}" for stage in _STAGES for parity in ("odd", "even")]
    words = {code: stage for stage, code in _STAGES.items() if stage not in ("batch", "record")}
    return Stretches(
        rows=[(name, sorted(rows[name])) for name in order if name in rows],
        words=words,
        looks={code: LOOKS[code] for code in words},
        groups={},
        axis=TIME,
        row_height=16,
    )


def spent(record: RunRecord) -> Stack | None:
    """What the slots did, step by step: the area of a colour is the time of slots that went there."""
    steps = [step for step in sorted(record.timeline.steps.values(), key=lambda s: s.recorded) if step.number >= 0]
    if not steps or not record.timeline.rows:
        return None
    every = -(-len(steps) // _MOST_BARS)
    chosen = [*steps[every - 1 :: every], *(steps[-1:] if len(steps) % every else [])]
    edges = [record.timeline.began, *(step.recorded for step in chosen)]
    found = slot_seconds(record.timeline.rows, edges)
    lengths = [b - a for a, b in pairwise(edges)]
    parts = {
        WORDS[code]: [float(s) / length if length > 0 else 0.0 for s, length in zip(of, lengths, strict=True)]
        for code, of in found.items()
        if of.any()
    }
    last = [0, *(step.number for step in chosen)]
    titles = [f"step {b}" if b - a <= 1 else f"steps {a + 1} to {b}" for a, b in pairwise(last)]
    return Stack(
        edges=[edge - record.began for edge in edges],
        parts=parts,
        looks={WORDS[code]: LOOKS[code] for code in DOINGS},
        axis=TIME,
        unit="slots",
        titles=titles,
    )


def curves(record: RunRecord, names: Sequence[tuple[str, str]], unit: str, low: float | None = None) -> Lines | None:
    """Metrics of steps: what they are called here, and there."""
    found = {}
    for label, name in names:
        x, y = record.series(name)
        if x:
            found[label] = Curve(x=x, y=y)
    return Lines(curves=found, axis=TIME, unit=unit, low=low) if found else None


def lengths(record: RunRecord, role: Role) -> Bars | None:
    """How long responses were, or verdicts, in the first and in the last quarter of the steps."""
    steps = [step for step in sorted(record.timeline.steps) if record.timeline.steps[step].lengths.get(role)]
    if not steps:
        return None
    quarter = max(1, len(steps) // 4)
    parts = {"all steps": steps}
    if len(steps) >= 2:
        parts |= {f"steps {steps[0]} to {steps[quarter - 1]}": steps[:quarter]}
        parts |= {f"steps {steps[-quarter]} to {steps[-1]}": steps[-quarter:]}
    counted = {name: _counted(record, role, of) for name, of in parts.items()}
    low, high = min(counted["all steps"]), max(counted["all steps"])
    bins = range(low, high + 1)
    shares = {name: [100 * found[b] / max(1, sum(found.values())) for b in bins] for name, found in counted.items()}
    return Bars(
        edges=[2 ** (b / BINS_PER_OCTAVE) for b in range(low, high + 2)],
        parts=shares,
        unit=f"% of {'responses' if role is Role.ROLLOUT else 'verdicts'}",
        x_unit="tokens",
        marks={f"{q:.0%}": quantile(counted["all steps"], q) for q in (0.5, 0.9, 0.99)},
    )


def quantile(counted: Counter[int], share: float) -> float:
    """Tokens that this share of what was counted does not exceed, to within a bin."""
    left = share * sum(counted.values())
    for b in sorted(counted):
        left -= counted[b]
        if left <= 0:
            return float(2 ** ((b + 1) / BINS_PER_OCTAVE))
    return 0.0


def _counted(record: RunRecord, role: Role, steps: Sequence[int]) -> Counter[int]:
    found: Counter[int] = Counter()
    for step in steps:
        found.update(record.timeline.steps[step].lengths[role])
    return found
