"""What the emulated trainer does beyond the contract: its sleep costs what its options say, and fails when asked."""

import os
import signal
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from pipeline.config import Config
from pipeline.core.errors import StageFailed
from stages.rl.emulated import EmulatedTrainer
from tests.fakes.ranks import started
from tests.fakes.tiny_policy import make_config, make_rows
from tests.stages.rl.test_offload import private_dirty

MANY = 64 << 20


def configured(**options) -> Config:
    return make_config("emulated", trainer__strategy="emulated", trainer__options=options)


def change(trainer: EmulatedTrainer, method: str) -> int:
    """By how much the process's own memory grew."""
    before = private_dirty(os.getpid())
    getattr(trainer, method)()
    return private_dirty(os.getpid()) - before


@pytest.mark.parametrize("fault", [{}, {"fault": "leak"}])
def test_it_holds_memory_while_it_is_awake_or_leaks_it(fault):
    trainer = EmulatedTrainer(configured(holds_bytes=MANY, **fault))
    for _ in range(3):
        shrunk, grown = -change(trainer, "sleep"), change(trainer, "wake")
        assert (shrunk > MANY * 0.9) == (grown > MANY * 0.9) == (not fault)


def test_a_refused_wake_leaves_it_asleep_and_once_is_once(tmp_path):
    trainer = EmulatedTrainer(configured(fault="refuse_wake", once=str(tmp_path / "marker")))
    trainer.sleep()
    with pytest.raises(StageFailed, match="refuse_wake"):
        trainer.wake()
    with pytest.raises(StageFailed, match="sleeps"):
        trainer.train(make_rows(1), 1)
    trainer.wake()
    trainer.train(make_rows(1), 1)
    trainer.sleep()
    trainer.wake()


def doze(end: Connection, options: dict) -> None:
    trainer = EmulatedTrainer(configured(**options))
    for method in ("sleep", "wake"):
        getattr(trainer, method)()
        end.send(method)


@pytest.mark.parametrize(("fault", "done"), [("die_in_sleep", []), ("die_in_wake", ["sleep"])])
def test_it_dies_where_it_is_asked_to(fault, done, tmp_path):
    marker = tmp_path / "marker"
    for expected, code in ((done, -signal.SIGKILL), (["sleep", "wake"], 0)):
        end, its = Pipe()
        process = started(doze, its, {"fault": fault, "once": str(marker)})
        its.close()
        process.join(20)
        assert process.exitcode == code and marker.exists()
        assert [end.recv() for _ in expected] == expected
        with pytest.raises(EOFError):
            end.recv()


def test_its_file_has_the_name_that_it_is_given(tmp_path):
    path = Path(f"/dev/shm/pivot-test-{os.getpid()}-emulated")
    trainer = EmulatedTrainer(configured(), offload_to=path)
    assert not path.with_name(f"{path.name}.0").exists()
    trainer.sleep()
    assert path.with_name(f"{path.name}.0").stat().st_size == 4096


def test_unknown_faults_are_refused():
    with pytest.raises(ValueError, match=r"trainer\.options\.fault is sulk; valid: \['die_in_sleep'"):
        EmulatedTrainer(configured(fault="sulk"))
