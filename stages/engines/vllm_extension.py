"""The private parts of vLLM 0.32 that weight updates of a live engine need; all else uses its public surface.

What the CPU platform does silently wrong without the care taken here, each proven by a test in tests/engines:
  * After loading, linear layers keep a packed copy and an EMPTY parameter. Loading into the parameters fails or does
    nothing, so an update makes the parameters anew and packs them again.
  * The reload of an experts layer skips the packing if the layer already has a kernel: it answers with old weights.
  * A tied head shares the embedding's parameter but has a packed copy of its own: it keeps the old weights.
"""

import copy
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.config.load import LoadConfig
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.worker.worker_base import WorkerBase

from pipeline.gps.layout import Part
from pipeline.gps.store import Store
from stages.engines.base import Stored
from stages.engines.vllm_layout import NotProven, learn, read_parts, remade
from stages.engines.vllm_scheduler import TellingScheduler
from stages.weights.boxes import all_of
from stages.weights.pinned import pin

LOAD_FORMAT = "gps"

Weights = Mapping[str, torch.Tensor]
"""All tensors of a version; those of other nodes are brought when they are asked for."""


@dataclass(slots=True)
class _Known:
    """How this process's rank lays out its model. `remade`: the modules that make something else of parameters."""

    parts: tuple[Part, ...]
    remade: frozenset[str] = frozenset()


_known: "WeakKeyDictionary[torch.nn.Module, _Known]" = WeakKeyDictionary()


_attached: dict[str, Store] = {}
"""By a rank that is a process of its own."""


@contextmanager
def opened(stored: Stored) -> Iterator[Weights]:
    """The one way by which a rank comes to a version, whether it is alone in the worker's process or has its own: all
    tensors, by their canonical names, to be read from for as long as it is open. Raises what Store.read does."""
    with _own(stored).read() as reader:
        yield all_of(reader)


def _own(stored: Stored) -> Stored:
    """As this process's rank has it."""
    if multiprocessing.parent_process() is None:
        return stored
    name = stored.store.name
    if name not in _attached:
        _attached[name] = copy.deepcopy(
            stored.store
        )  # which attaches it anew, also one that a fork has from the worker
    return replace(stored, store=_attached[name])


@register_model_loader(LOAD_FORMAT)
class GpsLoader(BaseModelLoader):
    """Gives a rank that starts what is Stored, `model_loader_extra_config["stored"]`, instead of the model's files."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        self._stored: Stored = load_config.model_loader_extra_config["stored"]
        self._weights: Weights = {}

    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing to do: the weights are in memory."""

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> torch.nn.Module:
        with opened(self._stored) as self._weights:
            model = super().load_model(vllm_config, model_config, prefix)
            if known := _known.get(model):
                known.remade = remade(model, known.parts, self._weights)
            self._weights = {}
        if self._stored.is_pinned:
            pin(_own(self._stored).store)
        return model

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """Raises ValueError if the tensors are not all that the model wants, or more."""
        loaded = model.load_weights(iter(self._weights.items()))
        lost = sorted({name for name, _ in model.named_parameters()} - loaded)
        if lost:
            raise ValueError(f"{model_config.model}: the weight store has nothing for {lost[:4]} ({len(lost)} in all)")
        try:
            _known[model] = _Known(learn(model, self._weights))
        except NotProven as error:
            print(f"updates of {model_config.model} go through vLLM's loader: {error}", flush=True)


def prepare_cpu() -> None:
    """Before the first engine of a process is made on a CPU."""
    # The first request for logprobs would compile one small function for 3 to 35 s.
    torch._dynamo.config.disable = True
    # Linux gives AMX tiles only to who asks; without, the first use is an illegal instruction.
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def reads_directly(worker: WorkerBase) -> bool:
    """Whether updates go straight into this rank's parameters."""
    return worker.model_runner.get_model() in _known


def forget_pages(worker: WorkerBase) -> None:
    """As Store.forget_pages, of what this rank has attached for itself."""
    for store in _attached.values():
        store.forget_pages()


def reload_weights(worker: WorkerBase, stored: Stored) -> None:
    with opened(stored) as weights:
        take(worker, weights)


def take(worker: WorkerBase, weights: Weights) -> None:
    """Replace all weights of a live rank in place; addresses that others hold stay valid.

    The caller has checked that names, shapes and dtypes are those of the model: a layer for which something is
    missing would keep its old weights or get uninitialised ones, without an error.
    """
    runner = worker.model_runner
    model = runner.get_model()
    on_cpu = worker.device.type == "cpu"
    if on_cpu:
        for module in model.modules():
            method = getattr(module, "quant_method", None)
            if isinstance(method, UnquantizedFusedMoEMethod):
                method.moe_kernel = None  # else the experts are not packed again
    known = _known.get(model)
    if known is not None and weights.keys() >= {part.name for part in known.parts}:
        with set_current_vllm_config(worker.vllm_config):
            read_parts(model, known.parts, weights, known.remade)
    else:
        runner.reload_weights(weights_iterator=iter(weights.items()))
    if on_cpu:
        _pack_tied_head(model, worker)


def _pack_tied_head(model: torch.nn.Module, worker: WorkerBase) -> None:
    head = getattr(model, "lm_head", None)
    embedding = getattr(getattr(model, "model", None), "embed_tokens", None)
    if head is None or embedding is None or head is embedding:
        return
    if head.weight.data_ptr() == embedding.weight.data_ptr():
        with set_current_vllm_config(worker.vllm_config):
            head.quant_method.process_weights_after_loading(head)


def remove_rendezvous_file() -> None:
    """The file by which an engine's processes find each other; with one process nobody will ask for it, and in a
    worker that is killed it would stay for ever."""
    name = os.environ.get("VLLM_DIST_IDENT")  # vLLM's own note; on a CPU only
    if name:
        Path(tempfile.gettempdir(), name).unlink(missing_ok=True)


def scheduler_of(llm: LLMEngine) -> TellingScheduler:
    """Of an engine that lives in this process."""
    return llm.engine_core.engine_core.scheduler  # type: ignore[no-any-return]


def has_cache(llm: LLMEngine, name: str) -> bool:
    """Whether anything of this request (by vLLM's own name) is computed; what waits or was preempted has nothing."""
    return scheduler_of(llm).requests[name].num_computed_tokens > 0


@contextmanager
def alone(llm: LLMEngine, num_requests: int) -> Iterator[Callable[[], None]]:
    """All that the engine has to do stands still, while `num_requests` that are added inside run to their end.

    The scheduler does not see the others, which stay as they are; vLLM lets running requests miss steps. Only if there
    are no places left, the youngest lose theirs (and are computed again); the function that is given does the same for
    one more, for callers whose requests do not get ahead for want of memory.
    """
    scheduler = scheduler_of(llm)
    running, waiting = scheduler.running, scheduler.waiting

    def make_room() -> None:
        if running:
            visible, scheduler.waiting = scheduler.waiting, waiting
            scheduler._preempt_request(running.pop(), time.monotonic())
            scheduler.waiting = visible

    while len(running) + num_requests > scheduler.max_num_running_reqs and running:
        make_room()
    scheduler.running, scheduler.waiting = [], create_request_queue(scheduler.policy)
    try:
        yield make_room
    finally:
        scheduler.running, scheduler.waiting = running, waiting
