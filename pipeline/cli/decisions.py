"""How decisions and shifts of a run are told."""

import time
from collections.abc import Iterable, Sequence

from pipeline.cli.terminal import table
from pipeline.core.events import INFERENCE, Role
from pipeline.watching.book import Line
from pipeline.watching.decided import Decided, Decisions
from pipeline.wording import number

NUM_SHOWN = 12
"""Of decisions and of shifts, the last."""


def show_decisions(decided: Decisions) -> str:
    parts = [_totals(decided)]
    if decided.decisions:
        shown = decided.decisions[-NUM_SHOWN:]
        parts.append(f"The last decisions\n{table(_decision_rows(shown))}\n\n{_LEGEND}")
    if decided.shifts:
        parts.append(f"The last shifts\n{table(_shift_rows(decided.shifts[-NUM_SHOWN:]))}")
    return "\n\n".join(parts)


_LEGEND = """\
  GPUs: rollout/reward/train before the decision; of the rest nobody had them
  gain: predicted when it was decided, and measured: what staying was predicted to be worth, less what was seen
  cost: seconds in which the GPUs that were shifted served nobody, spread over all; predicted with prefill
  regret: predicted less measured gain; -: not known yet, or nothing was compared"""


def _totals(decided: Decisions) -> str:
    moved = [d for d in decided.decisions if d.line["moves"]]
    known = [d.worth for d in moved if d.worth]
    done = [s for s in decided.shifts if s["old"] and not s["failure"]]
    trains = sum(Role.TRAIN in (s["old"], s["new"]) for s in done)
    rows = [
        ("asked", f"{len(decided.decisions)} times, and shifted {len(moved)} times"),
        ("shifts", f"{len(done)} of blocks, {trains} of them to training or from it"),
    ]
    if known:
        gains = [sum(line[name] for line in known) / len(known) for name in ("predicted_gain_s", "measured_gain_s")]
        rows.append(
            (
                "gain",
                f"{gains[0]:+.2f} s predicted, {gains[1]:+.2f} s measured, regret {gains[0] - gains[1]:+.2f} s: "
                f"means over {len(known)} shifting decisions",
            )
        )
    return table(rows)


def _decision_rows(shown: Sequence[Decided]) -> Iterable[tuple[str, ...]]:
    yield "AT", "STEP", "CAUSE", "GPUS", "DECISION", "GAIN", "MEASURED", "COST", "MEASURED", "REGRET"
    for decided in shown:
        line, worth, chosen = decided.line, decided.worth, decided.chosen
        predicted, measured = decided.cost_s
        yield (
            _clock(line["wall"]),
            str(line["step"]),
            line["cause"],
            "/".join(str(len(line["blocks"][role]) * line["block_slots"]) for role in Role),
            _decision(line),
            number(chosen["gain_s"] if chosen else None, "+.2f"),
            number(worth["measured_gain_s"] if worth else None, "+.2f"),
            number(predicted, ".2f"),
            number(measured, ".2f"),
            number(worth["regret_s"] if worth else None, "+.2f"),
        )


def _decision(line: Line) -> str:
    size, moves = line["block_slots"], list(line["moves"].values())
    parts = [f"{size * moves.count(role)} to {role}" for role in INFERENCE if role in moves]
    return f"shift {' and '.join(parts)}: {line['reason']}" if parts else f"stay: {line['reason']}"


def _shift_rows(shown: Sequence[Line]) -> Iterable[tuple[str, ...]]:
    yield "AT", "BLOCK", "SHIFT", "DOWN", "UP", "IN ALL", "ABORTED", "KEPT", "FOR"
    for line in shown:
        yield (
            _clock(line["wall"]),
            str(line["block"]),
            f"{line['old'] or 'nothing'} ▶ {line['new'] or 'nothing'}",
            _phases(line["down_s"]),
            _phases(line["up_s"]),
            line["failure"] or _seconds(line["took_s"]),
            str(line["aborted"]),
            f"{line['asleep_bytes'] / 1e6:.1f} MB",
            _asked_for(line),
        )


def _asked_for(line: Line) -> str:
    if line["decision"] is not None:
        return f"decision {line['decision']}"
    return "training" if Role.TRAIN in (line["old"], line["new"]) else "work without a block"


def _phases(phases: dict[str, float]) -> str:
    """The whole, and its parts."""
    parts = ", ".join(f"{name} {_seconds(value)}" for name, value in phases.items() if name != "all")
    whole = _seconds(phases["all"]) if "all" in phases else "-"
    return f"{whole} ({parts})" if parts else whole


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.0f} ms"


def _clock(wall: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(wall))
