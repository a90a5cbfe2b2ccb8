"""A trainer's state on the host: in place, whatever it is cut into, and really out of the process."""

import os
import re
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save

from pipeline.core.errors import RunError
from stages.rl.offload import Chunks, Offload, local
from stages.rl.state import image
from stages.rl.trainer import HfTrainer
from tests.fakes.ranks import started
from tests.fakes.tiny_policy import make_config, make_rows, write_model
from tests.stages.rl.test_ranks import ranked, saved

CPU = torch.device("cpu")


# --- storages -------------------------------------------------------------------------------------------------------


def test_storages_are_emptied_once_and_filled_again_under_all_that_views_them():
    whole = torch.arange(1000.0)
    tied, view, other = whole[:], whole[10:20], torch.arange(7)
    offload = Offload(CPU)
    offload.take([whole, tied, view, other, torch.empty(0)])
    assert offload.is_holding and offload.num_bytes == 4000 + 56
    assert whole.untyped_storage().nbytes() == 0 == other.untyped_storage().nbytes()
    for tensor, expected in ((whole, torch.arange(1000.0)), (view, torch.arange(10.0, 20.0)), (other, torch.arange(7))):
        assert torch.equal(offload.on_host(tensor), expected)
    assert whole.untyped_storage().nbytes() == 0
    offload.give_back()
    assert torch.equal(whole, torch.arange(1000.0)) and torch.equal(other, torch.arange(7))
    assert view.data_ptr() == whole.data_ptr() + 40 and tied.data_ptr() == whole.data_ptr()
    assert offload.on_host(whole).data_ptr() == whole.data_ptr()


def test_scratch_has_its_size_again():
    scratch = torch.ones(100)
    offload = Offload(CPU)
    offload.take([torch.ones(3)], [scratch])
    assert scratch.untyped_storage().nbytes() == 0 and offload.num_bytes == 12
    offload.give_back()
    assert scratch.untyped_storage().nbytes() == 400


def test_what_cannot_be_taken_is_left_as_it_was():
    own, foreign = torch.ones(10), torch.frombuffer(bytearray(40), dtype=torch.float32)
    offload = Offload(CPU)
    with pytest.raises(ValueError, match="cannot give back"):
        offload.take([own, foreign])
    with pytest.raises(RunError, match="shared memory"):
        offload.take([own], to_come_bytes=1 << 50)
    assert not offload.is_holding and own.sum() == 10


def test_pinned_memory_is_taken_once_and_pieces_may_lie_across_its_chunks():
    chunks = Chunks(64, lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
    chunks.reserve(200)
    assert chunks.num_allocations == 4
    first, second = (torch.randint(0, 256, (n,), dtype=torch.uint8) for n in (70, 130))
    chunks.write(0, first)
    chunks.write(70, second)
    for at, expected in ((0, first), (70, second), (63, torch.cat([first, second])[63:65])):
        found = torch.empty_like(expected)
        chunks.read(at, found)
        assert torch.equal(found, expected)
    chunks.reserve(256)
    assert chunks.num_allocations == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_file_is_what_the_library_writes(dtype):
    tensors = {"b.x": torch.randn(3, 5), "a": torch.randn(7), "c": torch.tensor(2.0), "é": torch.empty(0, 3)}
    found = image(lambda gather: ((name, gather(t)) for name, t in tensors.items()), lambda tensor: tensor, dtype)
    assert found == save({name: t.to(dtype) for name, t in tensors.items()}, metadata={"format": "pt"})


# --- trainers -------------------------------------------------------------------------------------------------------


def state_of(trainer: HfTrainer) -> list[torch.Tensor]:
    """All that is given up, but not gradients and buckets."""
    moments = [value for state in trainer.optimizer.state.values() for value in state.values()]
    models = [trainer.model, trainer.reference]
    return [*moments, *(t for model in models if model for t in (*model.parameters(), *model.buffers()))]


def identities(trainer: HfTrainer) -> tuple[int, ...]:
    parts = [trainer.model, trainer._policy, trainer.optimizer, *state_of(trainer), *map(local, state_of(trainer))]
    return tuple(map(id, [*parts, *([dist.group.WORLD] if dist.is_initialized() else [])]))


def require_emptied(trainer: HfTrainer) -> None:
    assert all(local(tensor).untyped_storage().nbytes() == 0 for tensor in state_of(trainer))
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in trainer._buckets.tensors())
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def rest(trainer: HfTrainer, which: int | None = None) -> None:
    """Sleep and wake; of the ranks, `which` alone."""
    if which is not None and trainer._ranks.rank != which:
        return
    before = identities(trainer)
    trainer.sleep()
    require_emptied(trainer)
    trainer.wake()
    assert identities(trainer) == before


CHANGES = {"algorithm__kl__coef": 0.1, "trainer__micro_batch_tokens": 40}


def test_nothing_stays_and_all_comes_back_as_the_same_objects(model):
    trainer = HfTrainer(make_config(model, **CHANGES))
    rest(trainer)
    trainer.train(make_rows(1), 1)
    rest(trainer)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("is_strict", [False, True])
def test_ranks_that_rest_train_on_bit_for_bit_also_when_one_rests_alone(pair, model, tmp_path, strategy, is_strict):
    """All, the first or the second; before and after passes without gradients, and a step that trains nothing."""
    determinism = {"run__determinism": "strict"} if is_strict else {}
    config = ranked(model, strategy, **CHANGES, **determinism)
    straight, rested = pair.make(config), pair.make(config)
    for step, which in enumerate((None, 0, 1, 0, None), start=1):
        scores = [1.0] * 16 if step == 3 else None
        rested.on_each(rest, which)
        assert rested.probe() == straight.probe()
        rested.on_each(rest, which)
        metrics = [trainer.train(make_rows(step, scores=scores), step) for trainer in (rested, straight)]
        assert metrics[0] == metrics[1]
    assert saved(rested, tmp_path / "rested") == saved(straight, tmp_path / "straight")


def sleep_alone(trainer: HfTrainer, which: int) -> None:
    if trainer._ranks.rank == which:
        trainer.sleep()


def wake_alone(trainer: HfTrainer, which: int) -> None:
    if trainer._ranks.rank == which:
        trainer.wake()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_save_needs_no_rank_awake(pair, model, tmp_path, strategy, which):
    trainer = pair.make(ranked(model, strategy))
    trainer.train(make_rows(1), 1)
    awake = saved(trainer, tmp_path / "awake")
    trainer.on_each(sleep_alone, which)
    assert saved(trainer, tmp_path / "asleep") == awake
    trainer.on_each(wake_alone, which)
    trainer.train(make_rows(2), 2)


def test_buckets_are_known_when_the_first_ones_are_gone(pair, tmp_path):
    """DDP fills its buckets anew after the first update. All that the gradients take is known, and not more."""
    trainer = pair.make(ranked(write_model(tmp_path / "model", hidden_size=256, intermediate_size=4096), "ddp"))
    for step in (1, 2):
        trainer.train(make_rows(step), step)
        known = sum(tensor.nbytes for tensor in trainer.own._buckets.tensors())
        assert known == sum(parameter.nbytes for parameter in trainer.own.model.parameters())


# --- memory ---------------------------------------------------------------------------------------------------------


def private_dirty(pid: int) -> int:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(re.search(r"Private_Dirty:\s+(\d+) kB", text)[1]) << 10


def resident(pid: int, what: str) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(rf"{what}:\s+(\d+) kB", text)[1]) << 10


def obey(end: Connection, config, offload_to: Path) -> None:
    """One method after the other, as told; answers with the bytes of the state."""
    torch.set_num_threads(1)
    trainer = HfTrainer(config, offload_to=offload_to)
    end.send(None)
    for method, args in iter(end.recv, None):
        getattr(trainer, method)(*args)
        end.send(trainer.offload.num_bytes)


@pytest.fixture
def distant(tmp_path):
    """(tell, pid) of a trainer of 7 M weights in a process of its own."""
    shape = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8}
    config = make_config(write_model(tmp_path / "model", initializer_range=0.02, **shape), algorithm__kl__coef=0.1)
    end, its = Pipe()
    path = Path(f"/dev/shm/pivot-test-{os.getpid()}-train-0")
    process = started(obey, its, config, path)

    def tell(method, *args):
        end.send((method, args))
        assert end.poll(100), f"{method} does not end"
        return end.recv()

    assert end.poll(100), "no trainer"
    end.recv()
    yield tell, process.pid
    end.send(None)
    process.join(10)
    assert not list(path.parent.glob(f"{path.name}*"))


def test_r21_the_process_gives_up_its_memory_and_takes_no_more_than_it_had(distant, tmp_path):
    """Measured from outside. The first two cycles warm up; thirty more do not grow."""
    tell, pid = distant
    tell("train", make_rows(1), 1)
    awake, asleep = [], []
    for cycle in range(32):
        awake.append(private_dirty(pid))
        num_bytes = tell("sleep")
        asleep.append(private_dirty(pid))
        if cycle == 1:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # its peak is counted from here
            before = resident(pid, "VmRSS")
            path = Path(f"{tmp_path}/checkpoints/step_1")
            tell("save", str(path.parent))
            peak, after_save = resident(pid, "VmHWM") - before, private_dirty(pid)
        tell("wake")
    assert num_bytes > 100 << 20  # weights, moments and reference, in float32
    for before, after in zip(awake, asleep, strict=True):
        assert before - after > 0.9 * num_bytes
    largest = (path / "trainer" / "optimizer.safetensors").stat().st_size
    assert largest < peak < 1.5 * largest
    assert after_save - asleep[1] < 0.1 * num_bytes
    assert awake[-1] - awake[2] < 4 << 20 and asleep[-1] - asleep[2] < 4 << 20
    tell("train", make_rows(2), 2)
