"""A hung engine ends its process, which says where it hung; one that only takes its time, or rests, does not."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from stages.engines.watchdog import Watchdog
from tests.fakes.stores import weight_store

ROOT = Path(__file__).parents[2]
LIMIT_S = 0.5

ENGINE = """
import ctypes, os, queue, sys, threading, time
from pipeline.config_engine import EngineOptions
from pipeline.gps.store import Store
from stages.engines.base import Request, Stored
from stages.engines.emulated import EmulatedEngine
from stages.engines.host import EngineHost
from stages.engines.watchdog import Watchdog

store, limit_s, faults = Store.attach(sys.argv[1]), float(sys.argv[2]), eval(sys.argv[3])
options = EngineOptions(name="emulated", options={"faults": faults})
class Slow(Stored):
    slow_s = 3 * limit_s

    def read(self):
        time.sleep(self.slow_s)
        return Stored.read(self)

class Slowest(Slow):
    slow_s = 50

def stored(kind, wait_s):
    return kind(store=store, version=0, wait_s=wait_s)

engine = EmulatedEngine("emulated", "float32", options, 512, stored(Stored, 1), 0, can_sleep=True)
host = EngineHost(engine, lambda counts: None, Watchdog("limits.engine_s", limit_s))
box = queue.SimpleQueue()

def ask(id):
    host.submit([Request(id=id, prompt_ids=[1], max_tokens=9, seed=0)], box)
    while not box.get().finish:
        pass
    print(id, flush=True)

def load(stored):
    ended = queue.SimpleQueue()
    host.load(stored, None, keep_kv=False, on_end=ended.put)
    assert ended.get() is None

def sleep():
    ended = queue.SimpleQueue()
    host.sleep(ended.put)
    assert ended.get() is None
    print("asleep", flush=True)

def wake(stored):
    ended = queue.SimpleQueue()
    host.wake(stored, None, on_end=ended.put)
    assert ended.get() is None
    print("awake", flush=True)

def life():
"""
SERVE = """
    os._exit(0)

threading.Thread(target=life).start()
host.run()
"""


def run(life: str, faults: str = "[]") -> tuple[int, list[str], list[str]]:
    """Exit code and lines of output and log of a process in which one thread lives so, beside the engine's."""
    code = ENGINE + "".join(f"    {line}\n" for line in life.splitlines()) + SERVE
    with weight_store("emulated") as store:
        command = [sys.executable, "-c", code, store.name, str(LIMIT_S), faults]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()


def test_an_engine_that_hangs_ends_its_process_and_says_where() -> None:
    code, said, (announced, over, *traces) = run("ask('first')\nask('second')", "[{'kind': 'hang', 'step': 12}]")
    assert (code, said) == (1, ["first"])
    assert announced == "an engine that hangs for limits.engine_s (0.5 s) ends this process"
    assert over == "limits.engine_s is over: the engine hangs, and this is where its threads are"
    assert traces[-1] == "limits.engine_s is over: the engine hangs"
    assert any("faults.py" in line and line.endswith(" in in_step") for line in traces)  # the engine's thread
    assert any(line.endswith(" in ask") for line in traces)  # and every other


def test_even_one_that_holds_the_interpreter() -> None:
    code, _, (announced, *traces) = run("host.call(lambda engine: ctypes.PyDLL(None).sleep(50))")
    assert code == 1
    assert "limits.engine_s" in announced and traces[0].startswith("Timeout")
    assert any(line.endswith(" in _drain") for line in traces)


def test_a_load_that_hangs_too() -> None:
    code, _, (_, over, *traces) = run("load(stored(Slowest, 0.2))")
    assert code == 1
    assert over.startswith("limits.engine_s + limits.publish_s is over") and over.startswith(traces[-1])


@pytest.mark.parametrize(
    ("phase", "before", "limit"),
    [
        ("sleep", ["first"], "limits.engine_s is over"),
        ("wake", ["first", "asleep"], "limits.engine_s + limits.publish_s is over"),
    ],
)
def test_a_sleep_or_wake_that_hangs_too(phase: str, before: list[str], limit: str) -> None:
    life = "ask('first')\nsleep()\nwake(stored(Stored, 0.2))"
    code, said, (_, over, *traces) = run(life, f"[{{'kind': 'hang_in_{phase}'}}]")
    assert (code, said) == (1, before)
    assert over.startswith(limit)
    assert any("faults.py" in line and line.endswith(" in in_shift") for line in traces)


def test_an_engine_that_rests_or_loads_for_longer_lives() -> None:
    life = f"""\
ask('first')
time.sleep({3 * LIMIT_S})
ask('second')
load(stored(Slow, {5 * LIMIT_S}))
sleep()
time.sleep({3 * LIMIT_S})
wake(stored(Slow, {5 * LIMIT_S}))
for n in range(40):
    ask(f'r{{n}}')
    time.sleep({LIMIT_S / 20})"""
    code, said, log = run(life)
    assert (code, len(log)) == (0, 1), log
    assert said == ["first", "second", "asleep", "awake", *(f"r{n}" for n in range(40))]


def test_an_engine_that_is_busy_for_longer_lives() -> None:
    life = """\
engine._options = engine._options.model_copy(update={'step_s': limit_s / 5})
host.submit([Request(id='long', prompt_ids=[1], max_tokens=12, seed=0)], box)
while not box.get().finish:
    pass
print('long', flush=True)"""
    code, said, log = run(life)
    assert (code, said, len(log)) == (0, ["long"], 1), log


def test_feeding_costs_next_to_nothing() -> None:
    watchdog = Watchdog("limits.engine_s", 120.0)
    try:
        watchdog.feed()
        started = time.perf_counter()
        for _ in range(10_000):
            watchdog.feed()
        assert (time.perf_counter() - started) / 10_000 < 10e-6
        assert watchdog.rest_after_s == pytest.approx(12.0)
    finally:
        watchdog.rest()
    assert watchdog.rest_after_s is None
