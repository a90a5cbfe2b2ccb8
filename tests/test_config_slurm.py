"""`cluster.slurm`: time limits as sbatch takes them."""

import math

import pytest
from pydantic import ValidationError

from pipeline.config_slurm import Slurm, time_s


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("30", 1800),
        ("30:30", 1830),
        ("1:30:00", 5400),
        ("2-12", 216_000),
        ("2-12:30", 217_800),
        ("1-00:00:01", 86_401),
        ("UNLIMITED", math.inf),
        ("", None),
        ("soon", None),
        ("1:2:3:4", None),
        ("1h", None),
    ],
)
def test_a_time_limit_in_seconds(text: str, expected: float | None) -> None:
    assert time_s(text) == expected


def test_a_time_limit_leaves_time_to_work() -> None:
    assert Slurm(time="3", signal_s=120).time == "3" and Slurm.model_validate({"time": 60}).time == "60"
    for text in ("2", "00:02:00", "tomorrow"):
        with pytest.raises(ValidationError):
            Slurm(time=text, signal_s=120)
