import re

import pytest

from pipeline.core.errors import StageFailed
from stages.rl.staleness import lag_metrics, require_bounded
from tests.fakes.tiny_policy import make_row


def row(member: int, versions: list[int], score: float | None = 1.0):
    tokens = [5] * len(versions)
    made = make_row(9, 0, member, prompt_ids=[3], tokens=tokens, logprobs=[-1.0] * len(tokens), score=score)
    made.versions[:] = versions
    return made


def test_lags_are_shares_of_tokens():
    rows = [row(0, [7, 7, 8]), row(1, []), row(2, [8], score=None), row(3, [8, 8, 8, 8])]
    assert lag_metrics(rows, 8) == {
        "staleness/lag_0": 6 / 8,
        "staleness/lag_1": 2 / 8,
        "staleness/mean": 2 / 8,
        "staleness/max": 1.0,
    }
    assert lag_metrics(rows[2:], 8) == {"staleness/lag_0": 1.0, "staleness/mean": 0.0, "staleness/max": 0.0}
    assert set(lag_metrics([row(0, [5])], 8)) == {"staleness/lag_3", "staleness/mean", "staleness/max"}
    assert all(type(value) is float for value in lag_metrics(rows, 8).values())


@pytest.mark.parametrize("rows", [[], [row(0, [])]])
def test_no_tokens_have_no_lag(rows):
    assert lag_metrics(rows, 8) == {}
    require_bounded(rows, 8, 0)


@pytest.mark.parametrize("bound", [0, 1, 2])
@pytest.mark.parametrize("lag", [-1, 0, 1, 2, 3])
@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("score", [1.0, None])  # one without a score is in no loss, and breaks the promise as well
def test_a_lag_beyond_the_bound_is_refused_by_name(bound, lag, place, score):
    versions = [8, 8, 8]
    versions[place] = 8 - lag
    rows = [row(0, [8]), row(1, versions, score)]
    if 0 <= lag <= bound:
        require_bounded(rows, 8, bound)
        return
    found = f"sequence {rows[1].id} has a token of version {8 - lag}: its step trains from version 8"
    with pytest.raises(StageFailed, match=re.escape(found) + f".*algorithm.staleness {bound} allows {8 - bound} to 8"):
        require_bounded(rows, 8, bound)
