"""What the judge failed on, and some responses with their critiques, as HTML."""

from collections.abc import Sequence

from pipeline.report.run import RunRecord
from pipeline.report.tables import Cell, shown, table, words
from pipeline.report.troubles import FAILED
from pipeline.watching.book import Line
from pipeline.wording import number

_MOST_BYTES = 1_000_000
"""Of samples. Spread over the run."""
_MOST_FAILED = 40
_UNKNOWN: Line = {
    **dict.fromkeys(("prompt", "ground_truth", "response", "critique", "failure"), ""),
    "score": None,
    "num_tokens": "?",
    "num_critique_tokens": "?",
    "finish": "?",
    "versions": ("?", "?"),
}
"""What a sample of an older run may lack."""
_FRAME_BYTES = 500
"""Of a sample without its texts."""


def failure_table(record: RunRecord) -> str:
    verdicts = record.total("genrm/num_verdicts")
    types = sorted({name for row in record.rows.values() for name in row if name.startswith(FAILED)})
    rows = [
        [words(name.removeprefix(FAILED)), Cell(f"{num:,.0f}"), Cell(f"{num / verdicts:.2%}" if verdicts else "-")]
        for name in types
        if (num := record.total(name))
    ]
    if not rows:
        return f"<p>None in {verdicts:,.0f} verdicts.</p>" if verdicts else ""
    return table([words("type"), Cell("verdicts"), Cell("share")], rows)


def sample_list(samples: Sequence[Line]) -> str:
    known = [_UNKNOWN | sample for sample in samples if "id" in sample and "step" in sample]
    chosen = _chosen(known)
    if not chosen:
        return ""
    ranks = _ranks(chosen)
    articles = "\n".join(_article(sample, ranks.get(sample["id"], "")) for sample in chosen)
    note = f"{len(chosen)} of {len(known)} that were kept. Best and worst: of the responses to a prompt."
    return f'<p class="note">{note}</p><div id="samples" data-choices="failed best worst">{articles}</div>'


def _chosen(samples: Sequence[Line]) -> list[Line]:
    """As many as there is room for: some failures, and of the rest every so many, newest step first."""
    failed = [sample for sample in samples if sample["failure"]][-_MOST_FAILED:]
    room = _MOST_BYTES - sum(map(_size, failed))
    others = [sample for sample in samples if not sample["failure"]]
    every = max(1, -(-sum(map(_size, others)) // max(1, room)))
    kept = [sample for group in list(_groups(others).values())[::-every] for sample in group]
    return sorted([*failed, *kept], key=lambda sample: (-sample["step"], sample["id"]))


def _groups(samples: Sequence[Line]) -> dict[str, list[Line]]:
    """The responses to one prompt in one step."""
    found: dict[str, list[Line]] = {}
    for sample in samples:
        found.setdefault(sample["id"].rpartition("-")[0], []).append(sample)
    return found


def _ranks(samples: Sequence[Line]) -> dict[str, str]:
    """Of each group the best and the worst, by id; where all are equal, none."""
    found: dict[str, str] = {}
    for group in _groups([sample for sample in samples if sample["score"] is not None]).values():
        ordered = sorted(group, key=lambda sample: sample["score"])
        if ordered[0]["score"] < ordered[-1]["score"]:
            found |= {ordered[0]["id"]: "worst", ordered[-1]["id"]: "best"}
    return found


def _size(sample: Line) -> int:
    return _FRAME_BYTES + sum(len(sample[name].encode()) for name in ("prompt", "response", "critique", "ground_truth"))


def _article(sample: Line, rank: str) -> str:
    failure, (oldest, newest) = sample["failure"], sample["versions"]
    outcome = f"failed: {failure}" if failure else f"score {number(sample['score'], '.3g')}"
    facts = (
        f"step {sample['step']}, {outcome}; {sample['num_tokens']} tokens, ended with {sample['finish']}, "
        f"version {oldest if oldest == newest else f'{oldest} to {newest}'}; "
        f"verdict of {sample['num_critique_tokens']} tokens"
    )
    kinds = " ".join(name for name in ("sample", "failed" if failure else "", rank) if name)
    truth = f"<h4>right answer</h4><pre>{shown(sample['ground_truth'])}</pre>" if sample["ground_truth"] else ""
    return (
        f'<article class="{kinds}"><h3>{shown(facts)}</h3><h4>prompt</h4><pre>{shown(sample["prompt"])}</pre>{truth}'
        f'<div class="sides"><div><h4>response</h4><pre>{shown(sample["response"])}</pre></div>'
        f"<div><h4>critique</h4><pre>{shown(sample['critique'])}</pre></div></div></article>"
    )
