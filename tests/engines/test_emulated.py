"""What the emulated engine promises beyond the contract: everything it says is a pure function."""

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pipeline.config import Config
from pipeline.core.errors import UpdateRefused
from stages.engines.base import Engine, Output, Request
from stages.engines.emulated import EmulatedEngine
from tests.engines.tiny import Rig, collect, drain, run

STOP = (2,)
ROOT = Path(__file__).parents[2]


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig.create("emulated")
    yield rig
    rig.close()


def start(rig: Rig, max_num_seqs: int = 64, kv_cache_bytes: int = 1 << 20, **options: object) -> Engine:
    return rig.start(EmulatedEngine, max_num_seqs=max_num_seqs, kv_cache_bytes=kv_cache_bytes, options=options)


def ask(id: str, seed: int, prompt: list[int] | None = None, max_tokens: int = 300, **more: object) -> Request:
    return Request(
        id=id, prompt_ids=prompt or [1, 70, 71 + seed % 9], max_tokens=max_tokens, seed=seed, stop_ids=STOP, **more
    )


def test_a_cut_sequence_goes_on_as_if_it_had_not_been_cut(rig: Rig) -> None:
    whole = run(start(rig), [ask(f"r{n}", n) for n in range(20)])
    assert {o.finish for o in whole.values()} == {"stop"}
    first, second = start(rig), start(rig, max_num_seqs=3)
    said: dict[str, Output] = {}
    for n in range(20):
        first.add(ask(f"r{n}", n))
    for _ in range(9):
        collect(said, first.step())
    collect(said, first.abort())
    cut = {id: output for id, output in said.items() if output.finish == "abort"}
    assert cut
    rest = run(
        second, [ask(id, int(id[1:]), [*ask(id, int(id[1:])).prompt_ids, *o.tokens], 291) for id, o in cut.items()]
    )
    for id, output in cut.items():
        assert output.tokens + rest[id].tokens == whole[id].tokens
        assert output.logprobs + rest[id].logprobs == whole[id].logprobs
        assert rest[id].finish == "stop"


def test_lengths_follow_the_options(rig: Rig) -> None:
    said = run(start(rig, median_tokens=20, sigma=0.4), [ask(f"r{n}", n) for n in range(400)])
    lengths = [len(o.tokens) for o in said.values()]
    assert statistics.median(lengths) == pytest.approx(20, abs=1.5)
    logs = np.log(lengths)
    assert float(logs.std()) == pytest.approx(0.4, abs=0.05)


def test_the_kv_budget_bounds_what_runs_and_changes_nothing_that_is_said(rig: Rig) -> None:
    requests = [ask(f"r{n}", n, prompt=[1] + [60 + n] * 99) for n in range(12)]
    free = run(start(rig), requests)
    engine = start(rig, kv_bytes_per_token=2000)  # 524 tokens: four sequences at first, fewer as they grow
    for request in requests:
        engine.add(request)
    said: dict[str, Output] = {}
    running = []
    while engine.has_unfinished():
        collect(said, engine.step())
        running.append(engine.counts().running)
    assert said == free
    assert min(len(output.tokens) for output in free.values()) > 5
    # Five of 100 tokens and the next one fit into 524, until each has grown by four.
    assert running[:5] == [5, 5, 5, 5, 4]


def test_a_budget_for_less_than_one_sequence_is_refused(rig: Rig) -> None:
    with pytest.raises(ValueError, match="not one sequence of 512"):
        start(rig, kv_bytes_per_token=4096)


def test_unknown_options_are_refused(rig: Rig) -> None:
    with pytest.raises(ValueError, match="median"):
        start(rig, median=3)


def test_steps_take_the_time_of_the_cost_model(rig: Rig) -> None:
    engine = start(rig, profile="h800:qwen2.5-7b", time_scale=3.0)
    before = time.monotonic()
    run(engine, [Request(id="a", prompt_ids=[1] * 100, max_tokens=5)])
    # One stream: 5.5 ms to read the weights and 2.5 ms of overhead for each token, three times as slow.
    assert 5 * 3 * 0.0080 < time.monotonic() - before < 5 * 3 * 0.0080 + 0.2


def test_steps_in_a_row_add_up_to_the_cost_model_whatever_python_takes(rig: Rig) -> None:
    engine = start(rig, step_s=0.02)
    engine.add(Request(id="a", prompt_ids=[1] * 10, max_tokens=25))
    before = time.monotonic()
    while engine.has_unfinished():
        engine.step()
        time.sleep(0.01)
    assert 25 * 0.02 - 0.001 < time.monotonic() - before < 25 * 0.02 + 0.2
    time.sleep(0.1)  # it has nothing to do
    engine.add(Request(id="b", prompt_ids=[1] * 10, max_tokens=1))
    before = time.monotonic()
    engine.step()
    assert time.monotonic() - before >= 0.02, "idle time is no part of a step"


def test_lengths_of_a_mixture_and_of_versions(rig: Rig) -> None:
    parts = [(0.75, 64.0, 0.2), (0.25, 640.0, 0.2)]
    said = run(start(rig, lengths=parts, grain=4), [ask(f"r{n}", n) for n in range(400)])
    lengths = [len(o.tokens) for o in said.values()]
    assert sum(length < 60 for length in lengths) == pytest.approx(300, abs=30), "of 16, the others of 160"
    assert statistics.median(length for length in lengths if length > 60) == pytest.approx(160, abs=12)


def test_what_goes_on_under_another_seed_is_as_long_as_those_that_came_so_far(rig: Rig) -> None:
    whole = [len(o.tokens) for o in run(start(rig, median_tokens=40), [ask(f"r{n}", n) for n in range(600)]).values()]
    kept = [ask(f"r{n}", 10_000 + n, prompt=[1, 70, *[90] * 50], num_kept=50) for n in range(600)]
    rest = [len(o.tokens) for o in run(start(rig, median_tokens=40), kept).values()]
    longer = [length - 50 for length in whole if length > 50]
    assert statistics.fmean(rest) == pytest.approx(statistics.fmean(longer), rel=0.15)


def test_critiques_are_as_long_as_asked_for_and_end_with_a_verdict(rig: Rig) -> None:
    engine = start(rig, script="judge", lengths=[(1.0, 120.0, 0.3)])
    requests = [ask(f"r{n}", 0, prompt=[1, 80, 81 + n], max_tokens=150) for n in range(100)]
    said = run(engine, requests)
    texts = [bytes(t - 3 for t in o.tokens[:-1]).decode() for o in said.values()]
    assert all(text.endswith((" Verdict: yes", " Verdict: no")) for text in texts)
    assert statistics.median(map(len, texts)) == pytest.approx(119, abs=8) and max(map(len, texts)) <= 149
    assert {o.finish for o in said.values()} == {"stop"}


def test_a_judge_says_a_verdict_that_depends_on_what_it_read(rig: Rig) -> None:
    engine = start(rig, script="judge")
    requests = [ask(f"r{n}", seed=0, prompt=[1, 80, 81 + n]) for n in range(40)]
    texts = {id: bytes(t - 3 for t in o.tokens[:-1]).decode() for id, o in run(engine, requests).items()}
    verdicts = [text.rpartition("Verdict: ")[2] for text in texts.values()]
    assert set(verdicts) == {"yes", "no"} and 8 < verdicts.count("yes") < 32
    again = run(start(rig, script="judge"), [ask("x", seed=99, prompt=[1, 80, 81 + 7])])["x"]
    assert bytes(t - 3 for t in again.tokens[:-1]).decode() == texts["r7"] and again.finish == "stop"
    assert run(engine, [ask("y", 1, regex=r"[\s\S]*Verdict: (yes|no)")])["y"].finish == "stop"
    with pytest.raises(ValueError, match="says nothing that fits"):
        engine.add(ask("z", 1, regex=r"[0-9]+"))


def test_the_trainers_probe_is_answered(rig: Rig) -> None:
    from stages.rl.emulated import EmulatedTrainer

    trainer = EmulatedTrainer(Config.model_validate(MINIMAL))
    engine = start(rig)
    trainer.weights = np.random.default_rng(1).normal(size=1024).astype(np.float32)
    trainer.version = 1
    trainer.publish(rig.store, 1)
    rig.store.seal(1)
    engine.load(rig.stored(), trainer.probe())
    trainer.weights[1023] += 1
    with pytest.raises(RuntimeError, match="is not the trainer's"):
        engine.load(rig.stored(), trainer.probe())


def test_faults_happen_when_told_and_once(rig: Rig, tmp_path: Path) -> None:
    marker = str(tmp_path / "raised")
    faults = [{"kind": "raise", "step": 3, "once": marker}]
    engine = start(rig, faults=faults)
    engine.add(ask("a", 1))
    engine.step()
    engine.step()
    with pytest.raises(RuntimeError, match="fails in step 3"):
        engine.step()
    survivor = start(rig, faults=faults)
    survivor.add(ask("a", 1))
    assert drain(survivor)["a"].finish == "stop"


def test_a_version_can_be_refused(rig: Rig) -> None:
    engine = start(rig, faults=[{"kind": "refuse", "version": 1}])
    before = run(engine, [ask("a", 1)])
    for version in (1, 2):
        with rig.store.write(version, 1):
            pass
        rig.store.seal(version)
        if version == 1:
            with pytest.raises(UpdateRefused, match="refused, as options"):
                engine.load(rig.stored())
            assert engine.version == 0 and run(engine, [ask("a", 1)]) == before
        else:
            engine.load(rig.stored())
    assert engine.version == 2


def test_a_shift_fails_when_told(rig: Rig) -> None:
    engine = start(rig, faults=[{"kind": "refuse_wake", "nth": 2}])
    engine.sleep()
    engine.wake(rig.stored())
    engine.sleep()
    with pytest.raises(RuntimeError, match="does not wake it, as options"):
        engine.wake(rig.stored())
    assert engine.is_asleep
    engine.wake(rig.stored())
    refusing = start(rig, faults=[{"kind": "refuse", "version": 0}])
    refusing.sleep()
    with pytest.raises(UpdateRefused, match="refused, as options"):
        refusing.wake(rig.stored())


def test_a_shift_takes_the_time_it_is_told(rig: Rig) -> None:
    engine = start(rig, sleep_s=0.1, wake_s=0.2)
    before = time.monotonic()
    engine.sleep()
    between = time.monotonic()
    assert engine.wake(rig.stored())["read"] >= 0.2
    assert between - before >= 0.1


SHIFT = """
import sys
from pathlib import Path
from pipeline.config_engine import EngineOptions
from pipeline.gps.store import Store
from stages.engines.base import Stored
from stages.engines.emulated import EmulatedEngine

def say(what):
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    print(what, next(line for line in lines if line.startswith("Private_Dirty")).split()[1], flush=True)

stored = Stored(store=Store.attach(sys.argv[1]), version=0, wait_s=1)
options = EngineOptions(name="emulated", options=eval(sys.argv[2]))
engine = EmulatedEngine("emulated", "float32", options, 512, stored, 0, can_sleep=True)
say("started")
engine.sleep()
say("asleep")
engine.wake(stored)
say("awake")
"""


def shift(rig: Rig, options: dict[str, object], **environment: str) -> tuple[dict[str, int], int]:
    """Private bytes of a process after what it lived to see, and how it ended."""
    command = [sys.executable, "-c", SHIFT, rig.store.name, repr(options)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=60, env=os.environ | environment, check=False
    )
    said = dict(line.split() for line in done.stdout.splitlines())
    return {what: int(kib) << 10 for what, kib in said.items()}, done.returncode


def test_what_it_holds_is_real_memory_unless_it_leaks(rig: Rig) -> None:
    size = 48 << 20
    sound, code = shift(rig, {"holds_bytes": size})
    assert code == 0
    assert sound["started"] - sound["asleep"] > 0.98 * size
    assert sound["awake"] - sound["asleep"] > 0.98 * size
    leaking, code = shift(rig, {"holds_bytes": size, "faults": [{"kind": "leak"}]})
    assert code == 0 and max(leaking.values()) - min(leaking.values()) < 0.1 * size


@pytest.mark.parametrize(("kind", "lived"), [("die_in_sleep", ["started"]), ("die_in_wake", ["started", "asleep"])])
def test_it_can_die_in_a_shift(rig: Rig, kind: str, lived: list[str]) -> None:
    said, code = shift(rig, {"faults": [{"kind": kind}]})
    assert (list(said), code) == (lived, 1)


@pytest.mark.parametrize(
    ("point", "lived"),
    [("down.release", ["started"]), ("up.weights", ["started", "asleep"]), ("up.cache", ["started", "asleep"])],
)
def test_each_phase_of_a_shift_has_a_kill_point(rig: Rig, point: str, lived: list[str]) -> None:
    said, code = shift(rig, {}, PIVOT_KILL_POINT=point)
    assert (list(said), code) == (lived, -signal.SIGKILL)


def test_an_engine_can_die_or_hang(rig: Rig) -> None:
    code = """
import sys
from pipeline.config_engine import EngineOptions
from pipeline.gps.store import Store
from stages.engines.base import Request, Stored
from stages.engines.emulated import EmulatedEngine
options = EngineOptions(name="emulated", options={"faults": [{"kind": sys.argv[2], "step": 2}]})
stored = Stored(store=Store.attach(sys.argv[1]), version=0, wait_s=1)
engine = EmulatedEngine("emulated", "float32", options, 512, stored, 0)
engine.add(Request(id="a", prompt_ids=[1], max_tokens=9))
engine.step()
print("one step", flush=True)
engine.step()
print("two steps", flush=True)
"""
    died, hung = (
        subprocess.Popen(
            [sys.executable, "-c", code, rig.store.name, kind], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        for kind in ("die", "hang")
    )
    assert died.communicate(timeout=30)[0] == "one step\n" and died.returncode == 1
    assert hung.stdout is not None and hung.stdout.readline() == "one step\n"
    with pytest.raises(subprocess.TimeoutExpired):
        hung.wait(0.1)
    hung.kill()
    assert hung.communicate()[0] == ""


def test_it_loads_neither_torch_nor_vllm() -> None:
    code = """
import sys
import stages.engines.emulated, stages.engines.vllm_start, stages.engines.torch_start
print([m for m in ("torch", "vllm", "transformers", "pyarrow") if m in sys.modules])
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT).stdout == "[]\n"


MINIMAL = {
    "model": {"policy": {"path": "emulated"}, "genrm": {"path": "emulated"}},
    "data": {"train_files": ["x"]},
    "reward": {"genrm": {"template": "x"}},
    "trainer": {"total_training_steps": 1, "strategy": "emulated"},
}
