"""How old the tokens of a batch are. A token's lag is the version that its step trains from, minus the token's own."""

from collections.abc import Sequence
from itertools import chain

import numpy as np

from pipeline.core.errors import StageFailed
from pipeline.queue.schema import SequenceRow


def require_bounded(rows: Sequence[SequenceRow], version: int, bound: int) -> None:
    """Every lag is 0 to `bound`, of sequences that are not trained too. Raises StageFailed: the promise that the run
    was asked for (`algorithm.staleness`) is broken, and training on would hide it."""
    for row in rows:
        for wrong in (min(row.versions, default=version), max(row.versions, default=version)):
            if not version - bound <= wrong <= version:
                raise StageFailed(
                    f"sequence {row.id} has a token of version {wrong}: its step trains from version {version}, and "
                    f"algorithm.staleness {bound} allows {version - bound} to {version}"
                )


def lag_metrics(rows: Sequence[SequenceRow], version: int) -> dict[str, float]:
    """The share of the batch's response tokens at each lag that occurs, their mean and largest lag."""
    lags = version - np.fromiter(chain.from_iterable(row.versions for row in rows), np.int64)
    if not len(lags):
        return {}
    found, counts = np.unique(lags, return_counts=True)
    shares = (counts / len(lags)).tolist()
    return {f"staleness/lag_{lag}": share for lag, share in zip(found.tolist(), shares, strict=True)} | {
        "staleness/mean": float(lags.mean()),
        "staleness/max": float(lags.max()),
    }
