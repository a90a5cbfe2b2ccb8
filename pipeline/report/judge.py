"""A judge that gives no verdicts, in words: of what `pipeline.watching.judge` told. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

MENDS = {
    "timeout": "raise `reward.genrm.timeout_s`, or give the judge more slots: it is asked faster than it answers",
    "truncated": "raise `reward.genrm.max_tokens`, or have the template ask for less: verdicts are cut off",
    "unparsed": "have the template say in which form the verdict is wanted, or set `reward.genrm.verdict.structured`",
    "out_of_range": "have the template say the range of scores, or widen `reward.genrm.verdict`",
    "empty": "look at the template: the judge ends without a word",
    "refused": "raise the judge's context: its prompt does not fit",
    "unreachable": "start the judge's server, or mend `reward.genrm.endpoint.url`",
}
"""What to do about a type of failure."""


def headline(judge: Mapping[str, Any]) -> str:
    types = ", ".join(f"{name} {num}" for name, num in sorted(judge["types"].items()))
    num = sum(judge["types"].values())
    return f"{num} of the first {judge['num_judged']} verdicts of step {judge['step']} failed ({types})"


def describe(judge: Mapping[str, Any]) -> Iterator[str]:
    """Lines for people."""
    yield f"warning: {headline(judge)}; what has no score is not trained, and the run goes on"
    for sample in judge["samples"]:
        yield f"  {sample['id']} {sample['failure']}: {sample['why']}"
        if sample["said"].strip():
            yield f"    it said: {' '.join(sample['said'].split())}"
    worst = max(judge["types"], key=lambda name: judge["types"][name])
    yield f"  what to do: {MENDS.get(worst, 'look at what the functions print: logs RUN --role reward')}"
