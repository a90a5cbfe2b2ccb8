"""What a sleeper may hold, by what it was seen to hold before."""

import pytest

from slurm.residents import SLACK_BYTES, Holdings

MIB = 1 << 20


@pytest.mark.parametrize(
    ("floor", "awake", "later", "is_believed"),
    [
        (300, 1300, 300, True),
        (300, 1300, 300 + 250 + 64, True),  # a quarter of the context, and the slack
        (300, 1300, 300 + 250 + 65, False),
        (300, 1300, 1300, False),
        (300, 310, 360, True),  # whose context is small is not asked to shrink
        (300, 280, 364, True),
    ],
)
def test_a_sleeper_may_hold_its_floor_and_a_part_of_its_context(
    floor: int, awake: int, later: int, is_believed: bool
) -> None:
    held = Holdings()
    assert held.asleep(floor * MIB) == ""
    assert held.wake(awake * MIB, 1, 0) == ""
    assert (held.asleep(later * MIB) == "") is is_believed


def test_floor_and_context_are_those_of_the_first_time() -> None:
    """Else what leaks slowly would never be seen."""
    held, leaked = Holdings(), 0
    held.asleep(100 * MIB)
    held.wake(500 * MIB, 1, 0)
    while not (fault := held.asleep(100 * MIB + leaked)):
        leaked += 10 * MIB
        assert held.wake(500 * MIB + leaked, 1, 0) == "" and leaked < 400 * MIB
    assert leaked == 170 * MIB > SLACK_BYTES
    assert fault == (
        "it says that it sleeps, and holds 270 MiB: 264 MiB are allowed, after 100 MiB at its first sleep and 400 MiB "
        "more at its first waking"
    )


def test_slot_memory_is_that_of_each_slot() -> None:
    held = Holdings()
    assert held.wake(800 * MIB, 2, 400 * MIB) == ""
    fault = held.wake(801 * MIB, 2, 400 * MIB)
    assert fault == "it holds 801 MiB: cluster.slot_memory is 400 MiB for each of its 2 slots"
