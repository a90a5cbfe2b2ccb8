"""What of a run needs a look, in a line each: from status.json and the metric rows. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.metrics import DROPPED, TRAINED
from pipeline.report.judge import headline
from pipeline.wording import seconds

Row = Mapping[str, float | None]
FAILED = "genrm/failed_"
"""Counts of a judge's failures, by type."""
_RECENT = 5
"""Steps that are looked at: one alone is mostly noise."""
_JUDGE_FAILS, _DROPPED = 0.02, 0.02
"""Shares above which it is told: one in fifty verdicts is more than bad luck."""
_SAME_WEIGHTS = 0.5
"""Of a logprob: half precision differs by tenths, other weights by more."""
_LATE = 2.0
"""Times the expected time of a step."""
_SILENT_S = 5.0
_BAD_STATES = ("fenced", "dead")


def troubles(status: Mapping[str, Any], rows: Sequence[Row], now: float) -> list[str]:
    """`now`: seconds since the epoch. The worst first."""
    return [*_of_parts(status, now), *_of_learning(rows)]


def _of_parts(status: Mapping[str, Any], now: float) -> Iterator[str]:
    if error := status.get("error"):
        place = " on ".join(str(error[key]) for key in ("role", "node") if error.get(key))
        yield f"{status['status']}{f' ({place})' if place else ''}: {error['reason']}"
    if status.get("live") and status["status"] == "running":
        silent_s = now - status.get("updated", now)
        if silent_s > _SILENT_S:
            yield f"the controller has said nothing for {seconds(silent_s)}"
        for node, state in (status.get("nodes") or {}).items():
            if state != "ready":
                yield f"node {node} is {state}"
        down = [w["name"] for w in status.get("workers") or () if w["state"] in _BAD_STATES]
        if down:
            yield f"without a process that works: {', '.join(down[:4])}{f' and {len(down) - 4} more' * (len(down) > 4)}"
        for step in status.get("steps") or ():
            took_s, expected_s = now - step["began"], step.get("expected_s")
            if expected_s and took_s > _LATE * expected_s:
                yield f"step {step['step']} takes {seconds(took_s)} so far, the ones before took {seconds(expected_s)}"
    if judge := status.get("judge"):
        yield headline(judge)
    mlflow = status.get("mlflow") or {}
    if mlflow.get("trouble"):
        yield f"MLflow: {mlflow['unsent_points']} points wait: {mlflow['trouble']}"


def _of_learning(rows: Sequence[Row]) -> Iterator[str]:
    recent = [row for row in rows if row.get(TRAINED) is not None][-_RECENT:]
    judged = total(recent, "genrm/num_verdicts")
    failed = total(recent, "genrm/num_failed")
    if judged and failed > _JUDGE_FAILS * judged:
        types = {name.removeprefix(FAILED) for row in recent for name in row if name.startswith(FAILED)}
        named = ", ".join(f"{name} {total(recent, FAILED + name):g}" for name in sorted(types))
        yield f"the judge failed on {failed / judged:.0%} of the last responses ({named})"
    dropped = total(recent, DROPPED)
    if dropped > _DROPPED * (dropped + total(recent, TRAINED)):
        yield f"{dropped:g} sequences of the last {len(recent)} steps were dropped"
    if skipped := total(recent, "train/nonfinite_updates"):
        yield f"{skipped:g} updates were skipped: their loss or gradient was not finite"
    if recent and (gap := recent[-1].get("mismatch/max_abs_logprob_diff") or 0.0) > _SAME_WEIGHTS:
        yield f"trainer and engine differ by {gap:.2g} on the logprob of a token: do they hold the same weights?"
    groups = total(recent, "train/num_groups_used")
    sequences = total(recent, "train/num_sequences")
    if sequences and groups == 0:
        yield f"no group of the last {len(recent)} steps has responses of different reward: nothing is learned"


def total(rows: Sequence[Row], name: str) -> float:
    return sum(row.get(name) or 0.0 for row in rows)
