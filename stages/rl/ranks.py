"""The processes that train together. Every rank holds the whole batch, plans alike and trains its share of the rows.

    ddp      each rank has the whole model; gradients are averaged after the last pass of an update
    fsdp2    each rank has a part of each tensor; a layer is gathered for its pass, its gradient is averaged and cut up
             after each one. By torch's fully_shard, because accelerate's plugin silently gives DDP on a CPU

All that is here is *collective* unless it says otherwise: each rank calls it, in the same order, or all wait until the
group's limit.
"""

import datetime
import functools
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from pipeline.config import Config


def join(rendezvous: Path, rank: int, num_ranks: int, limit_s: float) -> "Ranks":
    """Make the default process group, over a file that is new for each group and that all its ranks can reach.

    No call of the group waits longer than `limit_s`. Raises what torch.distributed does (RuntimeErrors) where a rank
    did not come.
    """
    rendezvous.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        store=dist.FileStore(str(rendezvous), num_ranks),
        rank=rank,
        world_size=num_ranks,
        timeout=datetime.timedelta(seconds=limit_s),
    )
    return Ranks(rank, num_ranks)


class Ranks:
    """The group, seen from one of its ranks; by default that of a process that trains alone."""

    def __init__(self, rank: int = 0, num_ranks: int = 1) -> None:
        self.rank = rank
        self.num_ranks = num_ranks

    @property
    def is_first(self) -> bool:
        """The one that writes: weight store, checkpoints. Not collective."""
        return self.rank == 0

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """The values of each rank, in the order of ranks, as float64."""
        if self.num_ranks == 1:
            return [list(values)]
        mine = torch.tensor(values, dtype=torch.float64)
        found = [torch.empty_like(mine) for _ in range(self.num_ranks)]
        dist.all_gather(found, mine)
        return [tensor.tolist() for tensor in found]

    def agree(self, value: int) -> int:
        """What the first rank says."""
        return int(self.gather([value])[0][0])


def distribute(model: Module, config: Config, accelerator: Accelerator, *, is_trained: bool = True) -> Module:
    """The model as it is called to look at it; on the accelerator's device, in its precision.

    `model` itself holds the parameters: take them, for an optimizer, after this. Called without gradients it needs
    no other rank, unless it is cut up.
    """
    is_cut_up = config.trainer.strategy == "fsdp2"
    if not is_trained:
        model.requires_grad_(False)
    if is_cut_up:
        _cut_up(model)
    prepared: Module = accelerator.prepare_model(
        model,
        device_placement=False if is_cut_up else None,
        evaluation_mode=True,  # else accelerate puts DDP around it
    )
    assert prepared is model
    return prepared


class Buckets:
    """What DDP adds up gradients in: as much memory as they have, of use within one pass alone. Only its own hook is
    ever shown them, so they are known from there."""

    def __init__(self, *, in_order: bool) -> None:
        self.in_order = in_order
        self.known: dict[int, weakref.ref[Tensor]] = {}

    def tensors(self) -> list[Tensor]:
        """Those that are there: DDP lets the first ones go when it fills them anew."""
        return [tensor for ref in self.known.values() if (tensor := ref()) is not None]


def averaging(model: Module, config: Config, buckets: Buckets) -> Module:
    """The distributed model as it is called to train it: under DDP gradients are averaged after a pass. Made at the
    first update: what was never seen in a pass, `buckets` do not know."""
    if config.trainer.strategy != "ddp" or not dist.is_initialized():
        return model
    device = next(model.parameters()).device
    wrapped = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    wrapped.register_comm_hook(buckets, _average)
    return wrapped


def _average(buckets: Buckets, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The mean over the ranks; `in_order` adds them up in their order.

    By itself DDP adds in an order that depends on an element's place in its bucket, and it fills the buckets anew
    after a process's first update: with three ranks a resumed run would differ in the last bits. Costs bandwidth.
    """
    mine = bucket.buffer()
    buckets.known[bucket.index()] = weakref.ref(mine)
    if not buckets.in_order:
        future: torch.futures.Future[Tensor] = allreduce_hook(dist.group.WORLD, bucket)
        return future
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    mean: torch.futures.Future[Tensor] = torch.futures.Future(devices=[mine.device] if mine.is_cuda else [])
    mean.set_result(sum(parts[1:], start=parts[0]) / len(parts))
    return mean


def _cut_up(model: Module) -> None:
    """Every parameter over the ranks, layer by layer: no rank ever holds more than its part and one whole layer."""
    layers = set(getattr(model, "_no_split_modules", None) or ())
    for module in model.modules():
        if type(module).__name__ in layers:
            fully_shard(module)
    fully_shard(model)
    if left := [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]:
        raise RuntimeError(f"fully_shard left {', '.join(left[:4])} whole")


def cut_again(model: Module) -> None:
    """Let go of what a pass without gradients has gathered and kept. Not collective, but each rank does it after the
    same passes: who has let go gathers in the next one, and the others must, too."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def syncing(policy: Module, is_last: bool) -> AbstractContextManager[None]:
    """Around a pass of an update. DDP averages gradients with the last one; sharded ones are averaged with each, or
    every rank would hold all of them. Not collective."""
    if isinstance(policy, DistributedDataParallel) and not is_last:
        context: AbstractContextManager[None] = policy.no_sync()
        return context
    return nullcontext()


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be cut up over the ranks; collective if it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_on_host(tensor: Tensor, part: Tensor) -> Tensor:
    """All of a tensor in host memory, from `part`, the rank's part of it there; collective, over gloo, if it is cut up.
    The other ranks may hold theirs anywhere."""
    if not isinstance(tensor, DTensor):
        return part
    mesh = tensor.device_mesh if tensor.device_mesh.device_type == "cpu" else _mesh_of_hosts()
    shape, stride = tensor.shape, tensor.stride()
    return DTensor.from_local(part, mesh, tensor.placements, shape=shape, stride=stride).full_tensor()


@functools.cache
def _mesh_of_hosts() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def like(parameter: Tensor, tensor: Tensor) -> Tensor:
    """A whole tensor, cut up as the parameter is. Not collective: each rank takes its part of what it has."""
    if not isinstance(parameter, DTensor) or tensor.shape != parameter.shape:
        return tensor
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(tensor.to(mesh.device_type), mesh, placements, src_data_rank=None)


def restore(model: Module, tensors: Mapping[str, Tensor]) -> None:
    """Load whole tensors of a state_dict into the model, whatever it is cut into. Not collective."""
    target = model.state_dict()
    model.load_state_dict({name: like(target[name], tensor) for name, tensor in tensors.items()})
