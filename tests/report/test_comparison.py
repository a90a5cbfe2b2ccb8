"""Runs beside each other on one page."""

import json
import re

import pytest

from pipeline.comparison import Outcome
from pipeline.report.comparison import comparison_page

IDLE = {"rollout": 0.1, "reward": 0.05, "train": 0.2, "shift": 0.05}


def outcome(speed: float | None, idle: dict[str, float]) -> Outcome:
    return Outcome(
        num_steps=3,
        sequences_per_s=speed,
        tokens_per_s=None,
        step_s=2.0,
        idle=idle,
        shifts_per_step=1.5,
        reward=0.25,
        accuracy=None,
        failed_judges=None,
    )


def rows(seconds: float) -> list[dict[str, float | None]]:
    made = [{"step": n, "time": 1000 + seconds * n, "timing_s/step": seconds} for n in (1, 2, 3)]
    return [{**row, "critic/score/mean": 0.1 * row["step"]} for row in made]


@pytest.fixture(scope="module")
def page() -> str:
    runs = {"shiftable": [rows(2.0), rows(2.1)], "<b>other</b>": [rows(4.0)]}
    means = {"shiftable": outcome(8.0, IDLE), "<b>other</b>": outcome(4.0, {})}
    return comparison_page("both, compared", runs, means)


def test_the_table_says_what_each_achieved_and_who_was_best(page: str) -> None:
    best = re.search(r'<tr class="best">(.*?)</tr>', page)
    assert best is not None and "shiftable" in best[1] and "100%" in best[1] and "40%" in best[1], "all idle time"
    assert "&lt;b&gt;other&lt;/b&gt;" in page and "<b>other" not in page, "a name is text"
    assert page.count('<tr class="best">') == 1 and "50%" in page


def test_curves_begin_together_and_what_nobody_measured_is_not_drawn(page: str) -> None:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert found is not None
    data = json.loads(found[1])
    assert set(data["charts"]) == {"steps", "step-time", "reward-steps", "reward-time"}, "no accuracy was measured"
    by_name = {one["name"]: one["x"] for one in data["charts"]["reward-time"]["series"]}
    assert by_name == {"shiftable": [2, 4, 6], "<b>other</b>": [4, 8, 12]}, "seconds since each began"
    assert data["steps"] == [[1, 4], [2, 8], [3, 12]], "those of the slowest"
