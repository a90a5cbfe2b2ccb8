"""Distributions of lengths: where they come from, and what drawing in groups keeps."""

from pathlib import Path

import numpy as np
import pytest

from pipeline.core.events import Finish, SegmentClosed, SegmentInfo, TaskEnded
from pipeline.journal import Journal
from pipeline.simulator.lengths import (
    POLICY_16K,
    VERDICT_4K,
    lognormal_mixture,
    lognormal_of_mean,
    measured_lengths,
    read_lengths,
)
from pipeline.simulator.measured import response_lengths, verdict_lengths


def test_the_policys_lengths_have_a_long_tail() -> None:
    lengths = lognormal_mixture(POLICY_16K, 16_384)
    assert lengths.mean == pytest.approx(5561, rel=0.01)
    assert lengths.percentile(50) == pytest.approx(4500, rel=0.02)
    assert lengths.percentile(90) == pytest.approx(10_900, rel=0.02)
    assert lengths.percentile(99) == 16_384
    assert lognormal_mixture(VERDICT_4K, 4096).mean == pytest.approx(1602, rel=0.01)


def test_a_single_lognormal_has_its_median() -> None:
    assert lognormal_mixture([(1.0, 1000.0, 0.5)], 100_000).percentile(50) == pytest.approx(1000, abs=1)


def test_shares_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ValueError, match="add up to 1"):
        lognormal_mixture([(0.5, 1000.0, 0.5)], 4096)


def test_correlation_changes_who_is_long_together_not_how_many() -> None:
    lengths = lognormal_mixture(POLICY_16K, 16_384)
    alone, alike = (lengths.draw(np.random.default_rng(3), 4000, 8, c) for c in (0.0, 0.34))
    spread = {name: np.log(x).mean(axis=1).std() for name, x in (("alone", alone), ("alike", alike))}
    # The mean of 8 independent values spreads by 1/sqrt(8) = .35 of one, of correlated ones by sqrt(.34 + .66/8) = .65.
    assert spread["alike"] / spread["alone"] == pytest.approx(0.65 / 0.354, rel=0.05)
    for drawn in (alone, alike):
        assert drawn.mean() == pytest.approx(lengths.mean, rel=0.02)
        assert np.percentile(drawn, 90) == pytest.approx(lengths.percentile(90), rel=0.03)


def test_scaled_lengths_stay_below_the_limit() -> None:
    lengths = lognormal_mixture(POLICY_16K, 16_384)
    longer, shorter = lengths.scaled(1.2), lengths.scaled(0.5)
    assert longer.values.max() == 16_384 and lengths.mean < longer.mean < 1.2 * lengths.mean
    # Halved before the limit, not after: what was cut comes back.
    assert shorter.mean > 0.5 * lengths.mean


def test_the_longest_of_few_responses_is_shorter_than_the_limit() -> None:
    few = measured_lengths([100, 200], 1000)
    assert (few.mean_longest(1), few.mean_longest(2)) == (150, 175)
    lengths = lognormal_mixture(POLICY_16K, 16_384)
    drawn = lengths.draw(np.random.default_rng(3), 4000, 8).max(axis=1)
    assert lengths.mean_longest(8) == pytest.approx(drawn.mean(), rel=0.02)
    assert lengths.mean_longest(1024) == pytest.approx(16_384, rel=1e-4)


def test_survival_is_the_share_that_is_longer() -> None:
    lengths = measured_lengths([100, 200, 200, 400], 1000)
    assert lengths.survival([0, 100, 200, 399, 400]).tolist() == [1.0, 0.75, 0.25, 0.25, 0.0]


def test_lengths_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "lengths").write_text('120\n{"num_tokens": 80, "id": "a"}\n\n4000\n')
    assert read_lengths(tmp_path / "lengths", 2048).values.tolist() == [80, 120, 2048]
    (tmp_path / "wrong").write_text("120\nmany\n")
    with pytest.raises(ValueError, match="wrong, line 2"):
        read_lengths(tmp_path / "wrong", 2048)


@pytest.mark.parametrize("line", ["NaN", "Infinity", "1e999", "-5", "true", "[5]", '{"num_tokens": null}'])
def test_what_is_no_number_of_tokens_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "wrong").write_text(f"120\n\n{line}\n")
    with pytest.raises(ValueError, match=r"wrong, line 3: neither"):
        read_lengths(tmp_path / "wrong", 2048)


def test_a_file_without_lengths_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ValueError, match="empty: no lengths"):
        read_lengths(tmp_path / "empty", 2048)
    (tmp_path / "binary").write_bytes(b"\xff\xfe1\x00")
    with pytest.raises(ValueError, match="binary: no text"):
        read_lengths(tmp_path / "binary", 2048)


def test_lengths_come_from_a_run(tmp_path: Path) -> None:
    """A response in two pieces, one that did not finish; of verdicts the tokens of two tasks."""
    (tmp_path / "journal").mkdir()
    journal = Journal(tmp_path / "journal/attempt_1.jsonl")
    for task, id, idx, num, finish in [
        ("rollout-1-0", "a", 0, 30, Finish.ABORT),
        ("rollout-1-1", "a", 1, 20, Finish.STOP),
        ("rollout-1-1", "b", 0, 90, Finish.FLUSH),
        ("rollout-1-1", "c", 0, 70, Finish.LENGTH),
    ]:
        segment = SegmentInfo(id=id, idx=idx, num_tokens=num, version=0, finish=finish)
        journal.write(SegmentClosed(task=task, segments=(segment,)), 0.0)
    with pytest.raises(ValueError, match="no verdict"):
        verdict_lengths(tmp_path, 1000)
    for num, tokens in ((3, 300), (1, 220)):
        result = {"genrm/num_verdicts": float(num), "genrm/num_tokens": float(tokens)}
        journal.write(TaskEnded(task="reward-1-2", ok=True, result=result), 0.0)
    journal.close()
    assert response_lengths(tmp_path, 1000).values.tolist() == [50, 70]
    assert verdict_lengths(tmp_path, 1000).mean == pytest.approx(130, rel=1e-3)
    with pytest.raises(ValueError, match="no finished response"):
        response_lengths(tmp_path / "journal", 1000)


def test_a_mean_beyond_the_limit_is_refused() -> None:
    assert lognormal_of_mean(3154, 0.6, 4096).mean == pytest.approx(3154, abs=2)
    with pytest.raises(ValueError, match="have a mean of 5000"):
        lognormal_of_mean(5000, 0.6, 4096)
