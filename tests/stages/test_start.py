"""How a rank gets its trainer: two real processes that make_trainer brings together."""

import os
import signal
import stat
import traceback
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from pipeline.config import Config
from pipeline.run_folder import RunFolder
from pipeline.stage import StageSpec
from stages import train
from stages.rl.trainer import HfTrainer
from stages.start import _interface_of, make_trainer
from tests.fakes.ranks import leaving, started
from tests.fakes.scripted import wait_until
from tests.fakes.tiny_policy import make_config, make_rows, write_model


def start(run: RunFolder, config: Config, rank: int, life: int) -> None:
    """A rank's start, and a step."""
    worker = SimpleNamespace(config=config, run=run, rank=rank, life=life, attempt=3, slots=[rank], host="127.0.0.1")
    trainer = make_trainer(worker)
    assert trainer.version == 1
    assert (dist.get_rank(), dist.get_world_size()) == (rank, 2)
    trainer.train(make_rows(2), 2)


def live(run: RunFolder, config: Config, rank: int, life: int) -> None:
    """`start` as a process that ends as a worker does: without destroying its group, which may hang in gloo."""
    torch.set_num_threads(1)
    try:
        start(run, config, rank, life)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_ranks_meet_in_the_run_folder_and_load_what_the_first_one_found(tmp_path, strategy):
    """The second one, which looks a moment later, sees a newer checkpoint."""
    model, run = write_model(tmp_path / "model"), RunFolder(tmp_path / "run")
    run.create()
    alone = HfTrainer(make_config(model))
    for step in (1, 2):
        alone.train(make_rows(step), step)
        for place in ("a", "b")[step - 1 :]:
            alone.save(str(tmp_path / place))
    configs = [
        make_config(
            model,
            trainer__strategy=strategy,
            trainer__ranks=2,
            cluster__slots_per_node=4,
            checkpoint__uri=str(tmp_path / place),
            limits__stage_s=30.0,
        )
        for place in ("a", "b")
    ]
    for life in (0, 1):  # a later life is another group
        ranks = [started(live, run, configs[rank], rank, life) for rank in (0, 1)]
        for rank in ranks:
            rank.join(60)
        assert [rank.exitcode for rank in ranks] == [0, 0]
        file = run.cache / "rendezvous" / f"train-3-{life}"
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_a_rank_whose_others_do_not_come_gives_up_in_time(tmp_path):
    model, run = write_model(tmp_path / "model"), RunFolder(tmp_path / "run")
    run.create()
    config = make_config(
        model, trainer__strategy="ddp", trainer__ranks=2, cluster__slots_per_node=4, limits__stage_s=1.0
    )
    with leaving(), pytest.raises(RuntimeError, match=r"[Tt]ime"):
        start(run, config, 0, 0)


def work(run: RunFolder, config: Config, rank: int, stage: str) -> None:
    """A rank's life; the second one is killed when it comes to the stage."""
    os.dup2(os.open(run.path / f"rank{rank}.log", os.O_CREAT | os.O_WRONLY, 0o600), 2)
    torch.set_num_threads(1)
    worker = SimpleNamespace(config=config, run=run, rank=rank, life=0, attempt=1, slots=[rank], host="127.0.0.1")
    worker.trainer = make_trainer(worker)
    worker.queue = SimpleNamespace(batch=make_rows)
    task = SimpleNamespace(worker=worker, log=print)
    if stage != "train":
        train.train(task, StageSpec(task="t", stage="train", step=1, version=0, attempt=1))
    is_there = run.path / "rank0.is_there"
    if rank == 1:
        wait_until(is_there.exists)  # else it may be killed while the first one is still in the stage before
        os.kill(os.getpid(), signal.SIGKILL)
    is_there.touch()
    getattr(train, stage)(task, StageSpec(task="t", stage=stage, step=1, version=1, attempt=1))


@pytest.mark.parametrize(("strategy", "stage"), [("ddp", "train"), ("fsdp2", "train"), ("fsdp2", "checkpoint")])
def test_a_rank_whose_others_are_killed_ends_as_a_worker_and_not_as_a_failed_stage(tmp_path, strategy, stage):
    model, run = write_model(tmp_path / "model"), RunFolder(tmp_path / "run")
    run.create()
    config = make_config(
        model, trainer__strategy=strategy, trainer__ranks=2, cluster__slots_per_node=4, limits__heartbeat_s=0.1
    )
    ranks = [started(work, run, config, rank, stage) for rank in (0, 1)]
    for process in ranks:
        process.join(60)
    said = (run.path / "rank0.log").read_text()
    assert [process.exitcode for process in ranks] == [1, -signal.SIGKILL], said
    assert f"rank 0 has lost the others in {stage}" in said.splitlines()[-1]


def test_ranks_use_the_interface_of_their_nodes_address():
    assert _interface_of("127.0.0.1") == "lo"
    with pytest.raises(RuntimeError, match=r"192\.0\.2\.1.*cluster\.env\.GLOO_SOCKET_IFNAME"):
        _interface_of("192.0.2.1")
