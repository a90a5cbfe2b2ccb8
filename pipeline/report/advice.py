"""What to change first: rules, each with its evidence. Pure.

A rule looks at the facts of a run and says what costs how much, and which key of the configuration is about it; `worth`
is the share of the run's time that it could win at most, or None where something is wrong rather than slow. Below its
bound a rule is silent: a change that may win less than one part in twenty is not the first to make.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pipeline.core.events import INFERENCE, Role
from pipeline.core.modes import ModeName
from pipeline.report.facts import Facts
from pipeline.report.judge import MENDS
from pipeline.wording import number

_WORTH = 0.05
"""Share of the time."""
_WRONG = 0.02
"""Share of verdicts, sequences or tokens: one in fifty is more than bad luck."""
_CLIPPED = 0.1
"""Share of responses that reach the limit: their judge reads answers without an end."""
_SIGNAL = 0.5
"""Share of the groups that teach something."""
_FULL = 0.9
"""Share of a cache: beyond it sequences give way and are prefilled again."""
_TAIL = 8.0
"""99 % of the lengths over their median: a lognormal tail of sigma .9."""
_FEW = 8
"""Decisions whose end is known: the mean of fewer says little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    change: str
    evidence: str
    worth: float | None = None


def advise(facts: Facts) -> list[Advice]:
    """What is wrong first, then by what it could win."""
    found = [advice for rule in _RULES for advice in rule(facts)]
    return sorted(found, key=lambda advice: (advice.worth is not None, -(advice.worth or 0.0)))


# --- what is wrong


def _judge_failures(facts: Facts) -> Iterator[Advice]:
    share = sum(facts.judge_failures.values())
    if share < _WRONG:
        return
    worst = max(facts.judge_failures, key=lambda name: facts.judge_failures[name])
    yield Advice(
        change=MENDS.get(worst, "look at the samples of failures below"),
        evidence=f"the judge failed on {share:.1%} of the responses, most often with `{worst}`; each is left out of "
        "its group, and a group that keeps fewer than two is dropped",
    )


def _fooled_judge(facts: Facts) -> Iterator[Advice]:
    if facts.false_positives is not None and facts.false_positives > 0.2:
        yield Advice(
            change="another judge or template, or verdicts by several samples: the policy is taught what is wrong",
            evidence=f"{facts.false_positives:.0%} of the answers that the exact checker calls wrong were judged right",
        )


def _nonfinite(facts: Facts) -> Iterator[Advice]:
    if facts.nonfinite:
        yield Advice(
            change="lower `trainer.lr` or `trainer.grad_clip`, or train in float32",
            evidence=f"{facts.nonfinite:g} updates were skipped: their loss or gradient was not finite",
        )


def _attempts(facts: Facts) -> Iterator[Advice]:
    if facts.num_attempts > 3:
        yield Advice(
            change="see `pivot-pipeline logs` for what ended the attempts; `checkpoint.save_freq` bounds what is lost",
            evidence=f"the run was begun {facts.num_attempts} times",
        )


def _clipped(facts: Facts) -> Iterator[Advice]:
    if facts.clipped is not None and facts.clipped > _CLIPPED:
        yield Advice(
            change="raise `rollout.max_response_length`, or reward shorter answers",
            evidence=f"{facts.clipped:.0%} of the responses were cut off at their limit",
        )


def _signal(facts: Facts) -> Iterator[Advice]:
    if facts.groups_used is not None and facts.groups_used < _SIGNAL:
        yield Advice(
            change="prompts that are neither solved nor hopeless, or a larger `rollout.n`",
            evidence=f"only {facts.groups_used:.0%} of the groups had responses of different reward: the rest of each "
            "step was generated and judged for nothing",
            worth=None if facts.groups_used < _SIGNAL / 2 else 1 - facts.groups_used,
        )


# --- where the time goes


def _idle(facts: Facts) -> Iterator[Advice]:
    idle = {role: facts.spent(code) for role, code in zip(Role, "rjt", strict=True)}
    worst = max(idle, key=lambda role: idle[role])
    whole = facts.spent("rjt.")
    if whole < _WORTH:
        return
    told = ", ".join(f"{role.value} {share:.0%}" for role, share in idle.items())
    yield Advice(
        change=_of_idle(facts, worst), worth=whole, evidence=f"{whole:.0%} of the slots' time was idle: {told}"
    )


def _of_idle(facts: Facts, worst: Role) -> str:
    if facts.mode is ModeName.DISAGGREGATED:
        return (
            "`placement.mode: shiftable`: slots that are idle in one role serve another; "
            "`pivot-pipeline simulate` says what that would give"
        )
    if facts.staleness == 0 and facts.mode is not ModeName.COLOCATED:
        return "`algorithm.staleness: 1`: the roles wait for each other within each step"
    if facts.mode is ModeName.SHIFTABLE:
        return (
            "more sequences per step (`data.train_batch_size`, `rollout.n`): there is too little for the "
            f"{worst.value} slots; or fewer `trainer.ranks`, if training waits"
        )
    return "`placement.mode: shiftable`, with `algorithm.staleness: 1`: the longest response holds all slots up"


def _tail(facts: Facts) -> Iterator[Advice]:
    if facts.tail is None or facts.tail < _WORTH:
        return
    told = ""
    if lengths := facts.lengths.get(Role.ROLLOUT):
        told = f"; the longest 1 % have over {lengths[1]:.0f} tokens, the median has {lengths[0]:.0f}"
        if lengths[1] > _TAIL * lengths[0]:
            told += ": a long tail"
    change = (
        "`algorithm.staleness: 1`, so that the next step begins beside the tail"
        if facts.staleness == 0
        else "a lower `rollout.max_response_length`, or more prompts per step"
    )
    yield Advice(
        change=change,
        worth=facts.tail,
        evidence=f"in {facts.tail:.0%} of the time less than a tenth of the usual sequences was rolled out{told}",
    )


def _barrier(facts: Facts) -> Iterator[Advice]:
    idle = facts.spent("j")
    if not facts.is_streaming and not facts.shares_slots and idle > _WORTH:
        yield Advice(
            change="`placement.admission: stream`: judge each response as soon as it is there",
            worth=idle,
            evidence=f"the judge's slots were idle for {idle:.0%} of all slots' time, and judging waits for the whole "
            "rollout",
        )


def _shifts(facts: Facts) -> Iterator[Advice]:
    """What shifts cost is known; what they gain is predicted, and measured against a prediction."""
    cost, gain = facts.spent("X"), facts.measured_gain_s
    if facts.num_weighed >= _FEW and gain is not None and gain < 0:
        yield Advice(
            change="raise `placement.planner.min_dwell_s`, or compare with `placement.mode: disaggregated` "
            "(`pivot-pipeline simulate`): shifts do not give what is predicted of them",
            worth=cost,
            evidence=f"{facts.num_weighed} decisions to shift were predicted to gain "
            f"{number(facts.predicted_gain_s, '+.2f')} s each, and measured to gain {gain:+.2f} s; {cost:.0%} of the "
            "slots' time went into them",
        )
    elif cost > _WORTH:
        yield Advice(
            change="raise `placement.planner.min_dwell_s`: shifts are too many for what each costs",
            worth=cost,
            evidence=f"{cost:.0%} of the slots' time went into {facts.num_shifts} decisions to shift",
        )


def _stages(facts: Facts) -> Iterator[Advice]:
    for stage, change in _OF_STAGE.items():
        share = facts.stages.get(stage, 0.0)
        if share > _WORTH:
            yield Advice(change=change, worth=share, evidence=f"`{stage}` ran for {share:.0%} of the steps' time")


_OF_STAGE = {
    "evaluate": "raise `evaluate.freq`, or lower `evaluate.num_prompts`",
    "save_checkpoint": "raise `checkpoint.save_freq`: training waits for a save to end",
    "publish": "a faster way between nodes, or longer steps: all replicas wait for new weights",
    "queue": "put the run's folder on a faster disk: batches are written before they are trained",
    "control": "a quieter host for the controller, or fewer and longer steps",
}


def _caches(facts: Facts) -> Iterator[Advice]:
    for role in INFERENCE:
        if facts.kv_use.get(role, 0.0) > _FULL and facts.waiting.get(role, 0.0) > 0:
            yield Advice(
                change=f"more memory for the caches of {role.value} (`{_ENGINE[role]}`), or more replicas",
                evidence=f"its caches were {facts.kv_use[role]:.0%} full, with {facts.waiting[role]:.0f} sequences "
                "waiting",
            )


_ENGINE = {Role.ROLLOUT: "rollout.engine", Role.REWARD: "reward.genrm.engine"}


def _lost(facts: Facts) -> Iterator[Advice]:
    if facts.spent("S") > _WORTH:
        yield Advice(
            change="see `pivot-pipeline logs` for what died: engines were started again and again",
            worth=facts.spent("S"),
            evidence=f"{facts.spent('S'):.0%} of the slots' time went into starts, after the first step",
        )


_RULES: tuple[Callable[[Facts], Iterator[Advice]], ...] = (
    *(_nonfinite, _judge_failures, _fooled_judge, _attempts, _clipped, _signal, _caches),
    *(_idle, _tail, _barrier, _shifts, _stages, _lost),
)
