"""How a live vLLM engine gives up its weights and caches, and takes them again.

On CUDA it is vLLM's own sleep mode. For CPUs vLLM has none, so here the storages of tensors lose their memory and get
it back: tensors, and all that holds or views them, stay. The packed copies of weights are dropped and made again by the
reload. Buffers, such as rotary tables, are no part of any checkpoint: they stay.
"""

import ctypes
import mmap
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.worker.worker_base import WorkerBase

from pipeline.kill_points import kill_point
from stages.engines.base import Stored
from stages.engines.vllm_extension import forget_pages, opened, reload_weights, take
from stages.engines.vllm_ranks import on_each

_LIBC = ctypes.CDLL(None)
_PACKED = "cpu_linear"  # where vLLM keeps the packed copy of a layer's weights, on a CPU


class Memory(Protocol):
    """Of all ranks of an engine. The order is `release`, `take_weights`, `take_caches`. After an error nobody knows
    what is there."""

    def release(self) -> None: ...

    def take_weights(self, stored: Stored) -> None: ...

    def take_caches(self) -> None:
        """Zeroed, as those of an engine that was just started; on a CPU, that is also what makes their memory real."""


class CudaMemory:
    """vLLM must have been started with `enable_sleep_mode`."""

    def __init__(self, llm: LLMEngine) -> None:
        self._llm = llm

    def release(self) -> None:
        kill_point("down.release")
        self._llm.sleep(level=2)  # both are dropped; buffers are kept in the host's memory
        on_each(self._llm, forget_pages)

    def take_weights(self, stored: Stored) -> None:
        self._llm.wake_up(tags=["weights"])
        kill_point("up.weights")
        on_each(self._llm, reload_weights, stored)

    def take_caches(self) -> None:
        kill_point("up.cache")
        self._llm.wake_up(tags=["kv_cache"])
        on_each(self._llm, _zero_caches)


class CpuMemory:
    def __init__(self, llm: LLMEngine) -> None:
        self._llm = llm

    def release(self) -> None:
        on_each(self._llm, _release)

    def take_weights(self, stored: Stored) -> None:
        on_each(self._llm, _take_weights, stored)

    def take_caches(self) -> None:
        on_each(self._llm, _take_caches)


@dataclass(slots=True)
class _GivenUp:
    """What a rank gave up, and is to get back: storages without their memory, and how much it was."""

    weights: list[tuple[torch.UntypedStorage, int]] = field(default_factory=list)
    caches: list[tuple[torch.UntypedStorage, int]] = field(default_factory=list)


_given_up: "WeakKeyDictionary[torch.nn.Module, _GivenUp]" = WeakKeyDictionary()


def _release(worker: WorkerBase) -> None:
    """What is freed here goes back to the system at once; nothing of it waits for a garbage collection."""
    model = worker.model_runner.get_model()
    for module in model.modules():
        if hasattr(module, _PACKED):
            setattr(module, _PACKED, None)
    held = _given_up.setdefault(model, _GivenUp())
    held.weights = _emptied(parameter.data for parameter in model.parameters())
    kill_point("down.release")
    held.caches = _emptied(_caches(worker))
    _LIBC.malloc_trim(0)
    forget_pages(worker)


def _take_weights(worker: WorkerBase, stored: Stored) -> None:
    with opened(stored) as weights:
        _restore(_given_up[worker.model_runner.get_model()].weights)
        kill_point("up.weights")
        take(worker, weights)


def _take_caches(worker: WorkerBase) -> None:
    kill_point("up.cache")
    _restore(_given_up[worker.model_runner.get_model()].caches)
    _zero_caches(worker)


def _caches(worker: WorkerBase) -> Iterable[torch.Tensor]:
    """All views of the KV cache's memory."""
    return worker.model_runner.kv_caches  # type: ignore[no-any-return]


def _zero_caches(worker: WorkerBase) -> None:
    for storage in _storages(_caches(worker)):
        torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Each once, without those that have no memory."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return list({storage.data_ptr(): storage for storage in found if storage.nbytes()}.values())


def _emptied(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.UntypedStorage, int]]:
    """Storages without their memory, and how much it was. Raises RuntimeError where it is not the storage's own."""
    sizes = [(storage, storage.nbytes()) for storage in _storages(tensors)]
    for storage, _ in sizes:
        storage.resize_(0)
    return sizes


def _restore(sizes: list[tuple[torch.UntypedStorage, int]]) -> None:
    while sizes:
        storage, num_bytes = sizes.pop()
        storage.resize_(num_bytes)
        _want_huge_pages(storage)


def _want_huge_pages(storage: torch.UntypedStorage) -> None:
    """Where the system has them, memory is there in a third of the time. It is advice: whether it is taken does not
    matter. Of whole pages only: at the edges is what others have allocated."""
    page = mmap.PAGESIZE
    first, end = -(-storage.data_ptr() // page) * page, (storage.data_ptr() + storage.nbytes()) // page * page
    if first < end:
        _LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_HUGEPAGE)
