"""A warm worker, forked by a real agent from a real zygote, with the emulated engine."""

import gc
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from submitit.core.utils import FailedJobError

from pipeline import wire
from pipeline.core.events import Finish, SegmentInfo, VerdictInfo
from pipeline.pickles import load_own
from pipeline.wire_counts import Counts
from slurm.executor import ElasticJobEnvironment
from tests.slurm.conftest import rig as rig  # the fixture
from tests.slurm.rig import Rig, start_order
from tests.slurm.tasks import Resumable, here


@pytest.fixture
def spare(rig: Rig) -> Iterator[str]:
    """A worker that the test may kill."""
    name = f"spare-{rig.num_tasks}"
    rig.start_worker(name)
    rig.ready(name)
    yield name


def test_the_result_is_submitits(rig: Rig) -> None:
    number = 41
    job = rig.submit("rollout-0", lambda: {"answer": number + 1})
    assert rig.expect(wire.TaskStarted, task=job.job_id).worker == "rollout-0"
    assert rig.result(job) == {"answer": 42}
    assert job.outcome() == (True, {"answer": 42}, "")
    assert job.done() and job.exception() is None


def test_an_exception_is_a_result_with_its_traceback(rig: Rig) -> None:
    def fail() -> None:
        raise LookupError("no such thing")

    job = rig.submit("rollout-0", fail)
    with pytest.raises(FailedJobError, match="no such thing"):
        rig.result(job)
    ok, _, error = job.outcome()
    assert not ok and "in fail" in error
    assert "no such thing" in (job.stdout() or "")


def test_a_result_that_cannot_be_pickled_is_an_error(rig: Rig) -> None:
    job = rig.submit("rollout-0", threading.Lock)
    with pytest.raises(FailedJobError, match="cannot pickle"):
        rig.result(job)


def test_two_tasks_at_once_keep_their_identity_and_log(rig: Rig) -> None:
    def meet() -> tuple[str, str, str]:
        task = here()
        task.worker.__dict__.setdefault("_meeting", threading.Barrier(2)).wait(10)
        print("printed by", task.spec.task)
        sys.stderr.write(f"complained by {task.spec.task}\n")
        task.worker._meeting.wait(10)
        task.log(f"logged by {task.spec.task}")
        environment = ElasticJobEnvironment()
        assert environment.activated()
        return here().spec.task, environment.job_id, str(environment.paths.result_pickle)

    jobs = [rig.submit("rollout-0", meet) for _ in range(2)]
    for job in jobs:
        me = job.job_id
        assert rig.result(job) == (me, me, str(job.paths.result_pickle))
        lines = (job.stdout() or "").splitlines()
        assert lines == [f"printed by {me}", f"complained by {me}", f"logged by {me}"]


def test_a_trainers_tasks_run_one_by_one_on_its_main_thread(rig: Rig) -> None:
    def where() -> tuple[bool, bool, int]:
        worker = here().worker
        return threading.current_thread() is threading.main_thread(), worker.engine is None, worker.trainer.version

    assert [rig.result(job) for job in [rig.submit("train-0", where) for _ in range(2)]] == [(True, True, 0)] * 2


def test_orders_reach_their_task_and_its_reports_come_back(rig: Rig) -> None:
    def obey() -> list[tuple[str, tuple[str, ...], tuple[int, ...]]]:
        task, orders = here(), []
        while not orders or orders[-1][0] != "end":
            order = task.next_order(10)
            assert order is not None
            orders.append((order.kind, order.ids, order.turns))
            if order.kind == "dispatch":
                task.report_segments(
                    [SegmentInfo(id=i, idx=0, num_tokens=3, version=0, finish=Finish.STOP) for i in order.ids]
                )
                task.report_verdicts([VerdictInfo(id=i, score=None, failure="empty") for i in order.ids])
                task.report_admitted(1, list(order.ids))
        assert task.next_order(0.0) is None
        return orders

    job = rig.submit("rollout-0", obey)
    me = {"worker": "rollout-0", "task": job.job_id}
    rig.send(wire.DispatchTask(ids=["a", "b"], turns=[1, 2], **me))
    assert rig.expect(wire.SegmentsClosed, **me).segments == [wire.Segment(i, 0, 3, 0, "stop") for i in "ab"]
    assert rig.expect(wire.VerdictsGiven, **me).verdicts == [wire.Verdict(i, None, "empty") for i in "ab"]
    assert rig.expect(wire.Admitted).ids == ["a", "b"]
    rig.send(wire.AbortTask(ids=["b"], **me))
    rig.send(wire.EndTask(**me))
    assert rig.result(job) == [("dispatch", ("a", "b"), (1, 2)), ("abort", ("b",), ()), ("end", (), ())]
    rig.send(wire.DispatchTask(ids=["late"], turns=[1], **me))  # to a task that has ended: no harm
    assert rig.call("rollout-0", lambda: "alive") == "alive"


def test_a_task_that_is_asked_to_end_stores_its_continuation(rig: Rig) -> None:
    job = rig.submit("rollout-0", Resumable(4))
    rig.expect(wire.TaskStarted, task=job.job_id)
    rig.send(wire.EndTask(worker="rollout-0", task=job.job_id))
    assert rig.result(job) == 4
    assert load_own(job.resubmit_pickle).function.done == 5


def test_requests_reach_the_engine_and_its_counts_are_reported(rig: Rig) -> None:
    def generate() -> int:
        import queue

        from stages.engines.base import Output, Request

        outbox: queue.SimpleQueue[Output] = queue.SimpleQueue()
        engine = here().worker.engine
        engine.submit([Request(id="r", prompt_ids=[5, 6], max_tokens=4)], outbox)
        outputs = [outbox.get(timeout=10)]
        while not outputs[-1].finish:
            outputs.append(outbox.get(timeout=10))
        return sum(len(output.tokens) for output in outputs)

    num_tokens = rig.call("rollout-0", generate)
    assert 1 <= num_tokens <= 4
    counts = rig.expect(Counts, worker="rollout-0", running=0)
    assert counts.num_tokens == num_tokens and counts.rss_bytes > 10 << 20


def test_a_sealed_version_is_loaded_and_a_missing_one_is_refused(rig: Rig) -> None:
    def write() -> None:
        with here().worker.policy.write(1, 5.0) as writer:
            entry = writer.entries["weight"]
            writer.buffer[entry.offset : entry.offset + 4] = b"\x00\x00\x80\x3f"

    rig.send(wire.LoadVersion(worker="rollout-0", version=1, keep_kv=False, probe=None))
    assert "does not hold version 1" in rig.expect(wire.UpdateFailed, worker="rollout-0", version=1).reason
    rig.call("train-0", write)
    rig.send(wire.SealVersion(version=1))
    rig.expect(wire.VersionSealed, version=1)
    rig.send(wire.LoadVersion(worker="rollout-0", version=1, keep_kv=False, probe=None))
    assert rig.expect(wire.VersionLoaded, worker="rollout-0", version=1).seconds < 5
    assert rig.call("rollout-0", lambda: here().worker.engine.version) == 1


@contextmanager
def own_rig(path: Path, **options: Any) -> Iterator[Rig]:
    """Workers whose policy engine has these options, and a limit that tests can wait for."""
    rig = Rig(path, rollout={"engine": {"name": "emulated", "options": options}}, limits={"engine_s": 1.0})
    try:
        rig.welcome()
        rig.expect(wire.NodeReady)
        for worker, role in (("rollout-0", "rollout"), ("train-0", "train")):
            rig.start_worker(worker, role)
            rig.ready(worker)
        yield rig
    finally:
        rig.close()


def begin_two() -> None:
    """Two requests, longer than any test, until the first token; their outputs are kept in the worker."""
    import queue

    from stages.engines.base import Request

    worker = here().worker
    worker.__dict__["_box"] = outbox = queue.SimpleQueue()
    worker.engine.submit([Request(id=f"r{n}", prompt_ids=[5, 6], max_tokens=500, seed=n) for n in range(2)], outbox)
    outbox.get(timeout=10)


def test_a_load_ends_what_runs_or_lets_it_go_on_and_a_hang_ends_the_worker(tmp_path: Path) -> None:
    def outputs_until(num_ended: int, version: int) -> list[tuple[int, int | None, str]]:
        """Until so many have ended, or one has a token of the version."""
        worker, outputs = here().worker, []
        while sum(o.finish != "" for o in outputs) < num_ended and not any(o.version == version for o in outputs):
            outputs.append(worker._box.get(timeout=10))
        worker.engine.abort(None)
        return sorted({(o.version, o.kv_version, o.finish) for o in outputs}, key=str)

    def write(version: int) -> None:
        with here().worker.policy.write(version, 5.0):
            pass

    with own_rig(tmp_path / "run", step_s=0.005, faults=[{"kind": "hang", "step": 150}]) as rig:
        for version, keep_kv in ((1, False), (2, True)):
            rig.call("train-0", partial(write, version))
            rig.send(wire.SealVersion(version=version))
            rig.expect(wire.VersionSealed, version=version)
            rig.call("rollout-0", begin_two)
            rig.send(wire.LoadVersion(worker="rollout-0", version=version, keep_kv=keep_kv, probe=None))
            rig.expect(wire.VersionLoaded, worker="rollout-0", version=version)
            said = rig.call("rollout-0", partial(outputs_until, 2, version))
            if keep_kv:
                assert said == [(1, None, ""), (2, 1, "")]
            else:
                assert said == [(0, None, ""), (0, None, "abort")]
        rig.submit("rollout-0", begin_two)
        reason = rig.expect(wire.WorkerExited, worker="rollout-0").reason
        assert reason.startswith("exit code 1") and reason.endswith("limits.engine_s is over: the engine hangs")
        log = next((tmp_path / "run").rglob("*rollout-0*.log")).read_text()
        assert "in in_step" in log and "in read" in log  # the engine's thread, and every other


def test_an_emulated_worker_has_neither_torch_nor_vllm(rig: Rig) -> None:
    for worker in ("rollout-0", "train-0"):
        modules = rig.call(worker, lambda: sorted(sys.modules))
        assert not {"torch", "vllm", "transformers", "mlflow"} & set(modules)
        with open(f"/proc/{rig.pids[worker]}/maps", encoding="utf-8") as file:
            assert "libtorch" not in file.read()


def test_the_environment_was_complete_before_python_started(rig: Rig) -> None:
    def environment() -> dict[str, str]:
        with open("/proc/self/environ", encoding="utf-8") as file:
            return dict(item.partition("=")[::2] for item in file.read().split("\0") if item)

    found = rig.call("rollout-0", environment)
    assert found["PYTHONSAFEPATH"] == "1" and found["FROM_CONFIG"] == "yes"
    assert found["OMP_NUM_THREADS"] == "2"  # cluster.env wins over ours
    assert not [name for name in found if name.startswith(("SLURM_", "SUBMITIT_", "MLFLOW_"))]


def test_a_worker_is_forked_from_a_frozen_heap_and_ignores_signals(rig: Rig) -> None:
    for name in ("TERM", "INT", "USR1", "USR2", "HUP"):
        os.kill(rig.pids["rollout-0"], getattr(signal, f"SIG{name}"))
    frozen, old, umask = rig.call("rollout-0", lambda: (gc.get_freeze_count(), gc.isenabled(), os.umask(0o077)))
    assert frozen > 10_000 and old and umask == 0o077


def test_a_foreign_pickle_is_not_loaded(rig: Rig) -> None:
    def replace_and_run(worker: str, task: str, folder: str) -> None:
        os.chmod(f"{folder}/{task}_submitted.pkl", 0o666)
        launch(worker, task, folder)

    launch, rig.executor._launch = rig.executor._launch, replace_and_run
    try:
        with pytest.raises(FailedJobError, match="PermissionError"):
            rig.call("rollout-0", lambda: "loaded")
    finally:
        rig.executor._launch = launch


def test_an_exception_in_the_engines_loop_ends_the_worker(rig: Rig, spare: str) -> None:
    def break_it() -> None:
        here().worker.engine.post(lambda engine: engine.no_such_method())

    job = rig.submit(spare, break_it)
    reason = rig.expect(wire.WorkerExited, worker=spare).reason
    assert reason.startswith("exit code 1") and "no_such_method" in reason
    job.fail(reason)
    assert job.state == "FAILED"


def test_a_worker_that_cannot_start_says_why(rig: Rig) -> None:
    rig.send(start_order("broken-0", version=99))
    assert "does not hold version 99" in rig.expect(wire.WorkerExited, worker="broken-0").reason


@pytest.mark.parametrize(
    ("end", "said"),
    [(lambda: os.kill(os.getpid(), signal.SIGKILL), "killed by SIGKILL"), (lambda: os._exit(7), "exit code 7")],
)
def test_a_dead_worker_is_reported_with_the_end_of_its_log(
    rig: Rig, spare: str, end: Callable[[], Any], said: str
) -> None:
    def speak_and_die() -> None:
        os.write(2, b"my last words\n")
        for step in range(150):  # more than the agent reads at once
            here().report_admitted(step, ["x" * 1000])
        end()

    job = rig.submit(spare, speak_and_die)
    reason = rig.expect(wire.WorkerExited, worker=spare).reason
    assert reason.startswith(said) and "my last words" in reason
    assert [m.step for m in rig.heard if isinstance(m, wire.Admitted) and m.worker == spare] == list(range(150))
    job.fail(reason)
    assert job.outcome() == (False, None, reason)


def test_latency_from_submit_to_running(rig: Rig) -> None:
    rig.call("rollout-0", lambda: None)
    seconds = []
    for _ in range(20):
        start = time.monotonic()
        job = rig.submit("rollout-0", lambda: None)
        rig.expect(wire.TaskStarted, task=job.job_id)
        seconds.append(time.monotonic() - start)
        rig.result(job)
    print(f"submit to running: median {statistics.median(seconds) * 1e3:.1f} ms, max {max(seconds) * 1e3:.1f} ms")
    assert statistics.median(seconds) < 0.05
