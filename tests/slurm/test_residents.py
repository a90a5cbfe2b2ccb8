"""What a sleeper may hold, by what it was seen to hold before."""

import pytest

from slurm.residents import DRIFT_BYTES, Holdings

MIB = 1 << 20


def seen(floor: int, awake: int) -> Holdings:
    """At the first sleep and the first waking, in MiB."""
    held = Holdings()
    assert held.asleep(floor * MIB) == "" and held.wake(awake * MIB, 1, 0) == ""
    return held


@pytest.mark.parametrize(
    ("floor", "awake", "before", "later", "is_believed"),
    [
        (300, 1300, 1300, 300, True),
        (300, 1300, 1300, 800, True),  # half of the context
        (300, 1300, 1300, 801, False),
        (300, 1300, 1300, 1300, False),
        (300, 1300, 1500, 900, True),  # what it has gathered by working is not asked for
        (170, 247, 310, 240, True),  # the quickstart's engine after 40 steps
        (170, 247, 310, 300, False),
        (40, 42, 80, 80, True),  # whose context is small is not asked to shrink
        (300, 280, 280, 310, True),
    ],
)
def test_a_sleep_frees_half_of_what_the_first_waking_took(
    floor: int, awake: int, before: int, later: int, is_believed: bool
) -> None:
    held = seen(floor, awake)
    held.before = before * MIB
    assert (held.asleep(later * MIB) == "") is is_believed


def test_without_another_measurement_it_must_shrink_from_its_last_waking() -> None:
    held = seen(300, 1300)
    assert held.asleep(300 * MIB) == "" and held.wake(1400 * MIB, 1, 0) == ""
    assert held.asleep(900 * MIB) == ""
    assert held.wake(1400 * MIB, 1, 0) == ""
    fault = held.asleep(901 * MIB)
    assert fault == (
        "it says that it sleeps, and holds 901 MiB: that is 499 MiB less than before, of 1000 MiB that its first "
        "waking took"
    )


def test_what_leaks_a_little_each_time_is_seen_in_the_end() -> None:
    held, leaked = seen(100, 500), 0
    while not (fault := held.asleep((100 + leaked) * MIB)):
        leaked += 10
        assert held.wake((500 + leaked) * MIB, 1, 0) == "" and leaked < 1000
    assert leaked == (200 + DRIFT_BYTES // MIB) // 10 * 10 + 10 == 460
    assert fault == (
        "it says that it sleeps, and holds 560 MiB: 556 MiB are allowed, after 100 MiB at its first sleep and 400 MiB "
        "more at its first waking"
    )


def test_slot_memory_is_that_of_each_slot() -> None:
    held = Holdings()
    assert held.wake(800 * MIB, 2, 400 * MIB) == ""
    fault = held.wake(801 * MIB, 2, 400 * MIB)
    assert fault == "it holds 801 MiB: cluster.slot_memory is 400 MiB for each of its 2 slots"
