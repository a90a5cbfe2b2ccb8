"""What an engine did is told in seconds and tokens, and nothing of what was measured is lost."""

import random
from dataclasses import fields

import pytest

from pipeline.wire_counts import Counts
from stages.engines.base import EngineCounts, EngineReport, Work
from stages.engines.speed import Speed

COUNTS = EngineCounts(running=3, waiting=2, num_tokens=70, held_tokens=500)


def decode(batch: int, context: int = 0) -> Work:
    return Work(batch=batch, context=context)


def test_steps_that_only_decode_are_iterations() -> None:
    speed = Speed()
    speed.step(0.010, decode(8, 800))
    speed.step(0.014, decode(4, 500))
    report = speed.take(COUNTS)
    assert (report.running, report.waiting, report.num_tokens, report.kv_tokens) == (3, 2, 70, 500)
    assert (report.num_iterations, report.batch, report.context) == (2, 6, 650)
    assert report.decode_s == pytest.approx(0.024)
    assert (report.prefill_tokens, report.prefill_s) == (0, 0.0)
    again = speed.take(COUNTS)
    assert (again.num_iterations, again.decode_s, again.batch, again.running) == (0, 0.0, 0.0, 3)


def test_of_a_step_that_does_both_decoding_takes_what_it_took_lately() -> None:
    speed = Speed()
    for _ in range(50):
        speed.step(0.010, decode(10))
    speed.take(COUNTS)
    speed.step(0.050, Work(batch=12, context=600, prefill_tokens=400))
    report = speed.take(COUNTS)
    assert (report.num_iterations, report.batch, report.context, report.prefill_tokens) == (1, 12, 600, 400)
    assert report.decode_s == pytest.approx(0.010) and report.prefill_s == pytest.approx(0.040)


def test_a_batch_of_another_size_says_nothing_of_it() -> None:
    speed = Speed()
    speed.step(0.010, decode(1))
    speed.take(COUNTS)
    speed.step(0.060, Work(batch=20, prefill_tokens=100))
    report = speed.take(COUNTS)
    assert report.decode_s == pytest.approx(0.010) and report.prefill_s == pytest.approx(0.050)  # 20 to 100


def test_lately_follows_a_change_and_forgives_one_slow_step() -> None:
    speed = Speed()

    def prefill_s() -> float:
        speed.take(COUNTS)
        speed.step(1.0, Work(batch=8, prefill_tokens=1))
        return speed.take(COUNTS).prefill_s

    for _ in range(20):
        speed.step(0.010, decode(8))
    speed.step(0.110, decode(8))
    assert prefill_s() == pytest.approx(1 - 0.030)
    for _ in range(30):
        speed.step(0.100, decode(8))
    assert prefill_s() == pytest.approx(1 - 0.100, abs=0.001)


def test_a_step_without_tokens_is_all_prefill() -> None:
    speed = Speed()
    speed.step(0.010, decode(4))
    speed.step(0.200, Work(prefill_tokens=2048))
    report = speed.take(COUNTS)
    assert (report.num_iterations, report.batch) == (1, 4)
    assert report.prefill_s == pytest.approx(0.200)


def test_seconds_are_never_lost_nor_negative() -> None:
    speed, random_ = Speed(), random.Random(1)
    for _ in range(100):
        seconds = [random_.expovariate(100) for _ in range(random_.randrange(1, 9))]
        for second in seconds:
            speed.step(second, Work(batch=random_.randrange(0, 9), prefill_tokens=random_.choice((0, 0, 30))))
        report = speed.take(COUNTS)
        assert report.decode_s + report.prefill_s == pytest.approx(sum(seconds))
        assert min(report.decode_s, report.prefill_s) >= 0


def test_what_was_cached_of_a_new_sequence_was_not_computed() -> None:
    speed = Speed()
    speed.start(100, 0)
    speed.start(100, 64)
    report = speed.take(COUNTS)
    assert (report.num_started, report.started_tokens, report.started_prefill_tokens) == (2, 200, 136)
    assert speed.take(COUNTS).num_started == 0


def test_a_report_has_the_words_of_the_wire() -> None:
    names = {field.name for field in fields(EngineReport)}
    assert names == set(Counts.__struct_fields__) - {"worker", "rss_bytes"}
