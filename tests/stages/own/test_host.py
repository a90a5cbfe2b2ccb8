"""The user's functions in processes of their own: whatever they do, who asked gets an answer with a type, soon."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import StageFailed
from pipeline.status import start_ticks
from stages.own import host
from stages.own.host import Fault, OwnFunction, Pool, own_loop, pool_of
from stages.own.messages import Returned
from tests.fakes.scripted import wait_until

FILE = Path(__file__).with_name("functions.py")
Ask = Callable[..., Any]


def function(name: str, **changes: Any) -> OwnFunction:
    told = {"memory_bytes": 256 << 20, "processes": 1, "concurrency": 16} | changes
    return OwnFunction(where="reward.functions.f", path=f"{FILE}:{name}", kind="score", code_path=(), **told)


def arguments(text: str, **more: Any) -> dict[str, Any]:
    return {"data_source": "d", "solution_str": text, "ground_truth": "34", "extra_info": {"nested": [2]}} | more


def ask(pool: Pool, text: str, timeout_s: float = 20.0, **more: Any) -> Any:
    return begin(pool, text, timeout_s, **more).result(60)


def begin(pool: Pool, text: str, timeout_s: float = 20.0, **more: Any) -> Any:
    begin.number += 1
    call = pool.call(f"call-{begin.number}", arguments(text, **more), timeout_s)
    return asyncio.run_coroutine_threadsafe(call, own_loop())


begin.number = 0


def make(own: OwnFunction) -> Pool:
    """Kept to the end, as workers do."""
    pools.append(Pool(own))
    return pools[-1]


pools: list[Pool] = []


@pytest.fixture(scope="module")
def odd() -> Pool:
    return make(function("odd"))


def test_tasks_that_begin_at_once_share_a_loop_and_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two loops, and the first lock that both want ends the run."""
    made = []

    def slowly() -> asyncio.AbstractEventLoop:
        time.sleep(0.05)
        made.append(asyncio.SelectorEventLoop())
        return made[-1]

    monkeypatch.setattr(host, "_loop", lru_cache(maxsize=1)(host._loop.__wrapped__))
    monkeypatch.setattr(asyncio, "new_event_loop", slowly)
    own = function("exact")
    with ThreadPoolExecutor(4) as threads:
        loops = list(threads.map(lambda _: own_loop(), range(4)))
        assert len(set(map(id, loops))) == len(made) == 1
        assert len(set(map(id, threads.map(lambda _: pool_of(own), range(4))))) == 1
    loops[0].call_soon_threadsafe(loops[0].stop)
    wait_until(lambda: not loops[0].is_running())
    loops[0].close()


def test_a_function_of_verl_is_called_unchanged() -> None:
    pool = make(function("exact"))
    assert ask(pool, "34") == Returned("call-1", 1.0, {}) and ask(pool, "43").score == 0.0


def test_a_result_may_have_parts_and_a_function_options(capfd: pytest.CaptureFixture[str]) -> None:
    found = ask(make(function("told")), "abc", factor=0.5)
    assert (found.score, found.figures) == (1.0, {"length": 3.0})
    assert "a function may print" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("raises", "error", "RuntimeError: a bug of the user's"),
        ("interrupts", "error", "SystemExit: 3"),
        ("eats", "memory", "more than its limit"),
        ("dies", "crashed", "SIGABRT"),
        ("leaves", "crashed", "exit code 0"),
        ("nothing", "invalid", "it returned NoneType None, which is no number"),
        ("nan", "invalid", "not finite"),
        ("text", "invalid", "a dict without 'score': ['points']"),
    ],
)
def test_what_goes_wrong_has_a_kind_and_the_next_call_works(odd: Pool, text: str, kind: str, said: str) -> None:
    found = ask(odd, text)
    assert isinstance(found, Fault) and found.kind == kind and said in found.text
    assert ask(odd, "fine").score == 1.0


@pytest.mark.parametrize("text", ["hangs", "holds the lock"])
def test_what_hangs_is_killed_in_time_and_the_others_do_not_notice(odd: Pool, text: str) -> None:
    pid = int(ask(odd, "pid").score)
    started = time.monotonic()
    waiting = [begin(odd, text, 0.3), begin(odd, "fine"), begin(odd, "fine")]
    found = [asked.result(30) for asked in waiting]
    assert found[0].kind == "timeout" and [f.score for f in found[1:]] == [1.0, 1.0]
    assert time.monotonic() - started < 15
    wait_until(lambda: start_ticks(pid) is None)


def test_async_calls_run_at_once_and_one_that_is_late_is_cancelled() -> None:
    pool = make(function("later"))
    ask(pool, "first")
    started = time.monotonic()
    asked = [begin(pool, "x") for _ in range(15)] + [begin(pool, "never", 0.4)]
    found = [one.result(30) for one in asked]
    assert [f.score for f in found[:-1]] == [1.0] * 15 and found[-1].kind == "timeout"
    assert time.monotonic() - started < 15 * 0.05 + 10


def test_an_async_function_that_cannot_be_cancelled_is_killed() -> None:
    pool = make(function("stubborn"))
    asked = [begin(pool, "never", 0.2), begin(pool, "x")]
    assert asked[0].result(30).kind == "timeout"
    assert asked[1].result(30).score == 1.0  # it was in the same process, and is tried in the next one


def test_a_call_that_is_taken_back_is_not_waited_for(odd: Pool) -> None:
    hanging = begin(odd, "hangs", 50.0)
    time.sleep(0.2)
    hanging.cancel()
    assert ask(odd, "fine").score == 1.0
    with pytest.raises(CancelledError):
        hanging.result(1)


@pytest.mark.parametrize("code", ["import nothing_of_this_name", "1 / 0", "def other(): ..."])
def test_code_that_cannot_be_imported_stops_the_stage(tmp_path: Path, code: str) -> None:
    (tmp_path / "mine.py").write_text(code)
    own = function("f", memory_bytes=1 << 30)
    pool = make(OwnFunction(**{f: getattr(own, f) for f in own.__slots__} | {"path": f"{tmp_path}/mine.py:f"}))
    with pytest.raises(StageFailed, match=r"reward.functions.f .*mine.py:f cannot be imported: (.|\n)*Error"):
        ask(pool, "x")


_OWNER = """
import asyncio, sys, time
from tests.stages.own.test_host import Pool, ask, begin, function
pool = Pool(function("odd"))
print(int(ask(pool, "pid").score), flush=True)
begin(pool, "holds the lock", 1000.0)
time.sleep(1000)
"""


def test_r26_the_process_dies_with_its_owner_whatever_it_does() -> None:
    owner = subprocess.Popen([sys.executable, "-c", _OWNER], stdout=subprocess.PIPE, text=True, cwd=FILE.parents[3])
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    os.kill(owner.pid, signal.SIGKILL)
    owner.communicate()
    wait_until(lambda: start_ticks(pid) is None)
