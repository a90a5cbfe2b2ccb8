"""How a choice of the guard and a decision of the planner are told."""

import json
from collections.abc import Iterable
from typing import Any

from pipeline.cli.terminal import table
from pipeline.core.events import INFERENCE, Role
from pipeline.core.modes import ModeName
from pipeline.core.planner.planner import Candidate, Plan
from pipeline.core.planner.preprocess import preprocess
from pipeline.core.snapshot import RoleView, Snapshot
from pipeline.simulator.choice import Choice
from pipeline.simulator.modes import Schedule
from pipeline.simulator.moment import Moment, Shift
from pipeline.simulator.setup import Setup
from pipeline.simulator.study import speed_text

_NUM_SHOWN = 6
"""Runners-up."""


def show_choice(choice: Choice, setup: Setup, gpu: str) -> str:
    chosen, speed = choice.schedule, choice.sequences_per_s
    rows = [
        ("chosen", f"{chosen}, {_training(chosen)}, on {setup.num_gpus} {gpu.upper()}"),
        ("predicted", f"{speed_text(speed)} sequences/s, a step of {_time(setup.workload.num_sequences / speed)}"),
        ("gain", _gain(choice)),
        ("took", f"{choice.took_s:.1f} s: {len(choice.predicted)} schedules were simulated, {_left_out(choice)}"),
    ]
    if choice.stands_for > 1:
        rows.append(
            (
                "scale",
                f"simulated on {setup.num_gpus // choice.stands_for} GPUs with a {_ordinal(choice.stands_for)} of the "
                "prompts of a step: as many sequences per GPU",
            )
        )
    others = [s for s in choice.predicted if s != chosen][:_NUM_SHOWN]
    shown = [s for s in choice.predicted if s == chosen or s in others or s in choice.runners_up]
    lines = [
        ("", "SCHEDULE", "SEQUENCES/S", "OF THE CHOICE"),
        *(("▶" if s == chosen else "", str(s), speed_text(v), f"{v / speed:.0%}") for s, v in _some(choice, shown)),
    ]
    return f"{table(rows, indent='')}\n\n{table(lines, indent='')}"


def show_moment(snapshot: Snapshot, plan: Plan) -> str:
    rows = [
        (
            "version",
            f"{snapshot.version}; under way: {_steps(snapshot)}",
        ),
        *((role.value, _load(snapshot, role)) for role in INFERENCE),
        ("train", _train(snapshot)),
        ("GPUs", f"rollout/reward/train {_gpus(snapshot)}{_shifting(snapshot)}"),
        ("decision", _decision(snapshot, plan)),
        ("because", _because(plan)),
    ]
    if not plan.candidates:
        return table(rows)
    size = snapshot.block_slots
    train = len(snapshot.blocks) * size - sum(_split(plan.candidates[0], size))
    now = _as_it_is(snapshot)
    header = ("", "ROLLOUT/REWARD/TRAIN", "VALUE", "GAIN", "PENALTY", "")
    lines = [
        (
            "▶" if i == plan.chosen else "",
            "/".join(str(n) for n in (*_split(c, size), train)),
            _time(c.value_s),
            f"{c.gain_s:+.1f} s",
            f"{c.penalty_s:.1f} s",
            "as it is" if (c.num_rollout, c.num_reward) == now else "",
        )
        for i, c in enumerate(plan.candidates)
    ]
    return (
        f"{table(rows)}\n\n{table([header, *lines])}\n\n"
        "  value: until the step after the next one can be trained, and what that leaves undone\n"
        "  gain: against staying, or where GPUs have no role, against the worst\n"
        "  penalty: what of the value the shift itself costs"
    )


def show_cycle(moment: Moment) -> str:
    """The shifts of the cycle that follows."""
    head = f"\n  Until the next version it is asked {_times(moment.num_asked)} and shifts {_times(len(moment.shifts))}"
    if not moment.shifts:
        return head
    rows = [(f"{s.at_s:.0f} s", f"{_pair(s.before)} ▶ {_pair(s.after)}", _why_shift(s)) for s in moment.shifts]
    return f"{head} (rollout/reward):\n{table(rows, indent='    ')}"


def moment_as_json(snapshot: Snapshot, plan: Plan) -> dict[str, Any]:
    size = snapshot.block_slots
    return {
        "reason": plan.reason,
        "moves": {str(block): role.value for block, role in plan.moves.items()},
        "chosen": plan.chosen,
        "candidates": [
            {
                "rollout": c.num_rollout * size,
                "reward": c.num_reward * size,
                "value_s": c.value_s,
                "gain_s": c.gain_s,
                "penalty_s": c.penalty_s,
            }
            for c in plan.candidates
        ],
        "cycle_s": plan.cycle_s,
        "snapshot": json.loads(snapshot.to_json()),
    }


# --- the choice


def _training(schedule: Schedule) -> str:
    who = "1 GPU trains" if schedule.train == 1 else f"{schedule.train} GPUs train"
    return who + (" a step when it is judged" if schedule.mode is ModeName.SHIFTABLE else "")


def _gain(choice: Choice) -> str:
    best = choice.best_static
    if choice.schedule.mode is ModeName.SHIFTABLE:
        return f"{choice.gain:.3f} times the best static schedule, {best}"
    if all(s.mode is ModeName.SHIFTABLE or s == best for s in (*choice.predicted, *choice.dropped)):
        return "none to tell: no other static schedule fits"
    return f"{choice.gain:.3f} times the next static schedule; no shiftable one is predicted to win"


def _left_out(choice: Choice) -> str:
    return f"{len(choice.dropped)} cannot win" if choice.dropped else "none left out"


def _some(choice: Choice, shown: list[Schedule]) -> Iterable[tuple[Schedule, float]]:
    return ((s, v) for s, v in choice.predicted.items() if s in shown)


def _ordinal(scale: int) -> str:
    return {2: "half", 3: "third", 4: "quarter"}.get(scale, f"{scale}th")


# --- the moment


def _steps(snapshot: Snapshot) -> str:
    steps = [str(crowd.step + 1) for crowd in snapshot.rollout.crowds]
    if not steps:
        return "nothing"
    return f"step{'s' * (len(steps) > 1)} {', '.join(steps)}, of {snapshot.num_sequences} responses"


def _load(snapshot: Snapshot, role: Role) -> str:
    """Running and waiting, by step."""
    view = snapshot.role(role)
    if not view.crowds:
        return "nothing to do"
    return "; ".join(f"step {c.step + 1}: {_crowd(view, i)}" for i, c in enumerate(view.crowds))


def _crowd(view: RoleView, index: int) -> str:
    crowd = view.crowds[index]
    begun = sum(crowd.ages)
    if not begun:
        return f"{crowd.num_waiting:.0f} wait" if crowd.num_waiting else "none"
    tokens = sum(i * num for i, num in enumerate(crowd.ages)) * view.bin_tokens / begun
    return f"{begun:.0f} begun, {tokens:.0f} tokens each, {crowd.num_waiting:.0f} wait"


def _train(snapshot: Snapshot) -> str:
    train = snapshot.train
    if train.left_s is not None:
        return f"step {snapshot.version + 1}, {_time(train.left_s)} of {_time(train.step_s)} to go"
    if train.is_waiting:
        return f"step {snapshot.version + 1} is judged and waits for its GPUs"
    return f"nothing to train; a step would take {_time(train.step_s)}"


def _gpus(snapshot: Snapshot) -> str:
    size = snapshot.block_slots
    return "/".join(str(size * sum(block.role is role for block in snapshot.blocks)) for role in Role)


def _shifting(snapshot: Snapshot) -> str:
    num = sum(block.ready_in_s > 0 for block in snapshot.blocks) * snapshot.block_slots
    return f", {num} of them on their way" if num else ""


def _decision(snapshot: Snapshot, plan: Plan) -> str:
    if not plan.moves:
        return "stay"
    size = snapshot.block_slots
    parts = [
        f"{size * num} to {role.value}"
        for role in INFERENCE
        if (num := sum(new is role for new in plan.moves.values()))
    ]
    return f"shift {' and '.join(parts)}"


def _because(plan: Plan) -> str:
    if plan.reason == "no candidate gains enough" and plan.candidates:
        most = max(c.gain_s for c in plan.candidates)
        return f"{plan.reason}: at most {most:.1f} s of a cycle of {_time(plan.cycle_s)}"
    return plan.reason


def _as_it_is(snapshot: Snapshot) -> tuple[int, int] | None:
    """Blocks of rollout and reward, of those that may change; None where some of them have neither role."""
    picture = preprocess(snapshot)
    return picture.now if sum(picture.now) == len(picture.free) else None


def _split(candidate: Candidate, size: int) -> tuple[int, int]:
    return candidate.num_rollout * size, candidate.num_reward * size


def _pair(gpus: tuple[int, int]) -> str:
    return f"{gpus[0]}/{gpus[1]}"


def _why_shift(shift: Shift) -> str:
    return shift.reason if shift.gain_s is None else f"gain {shift.gain_s:.1f} s"


def _time(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 else f"{value:.2f} s"


def _times(num: int) -> str:
    return "once" if num == 1 else f"{num} times"
