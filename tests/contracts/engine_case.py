"""An engine of any kind, and what the contract's tests do with it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from pipeline.gps.store import Reader
from pipeline.wire_shift import Probe
from stages.engines.base import Engine, Request
from stages.engines.stream import greedy_answer
from tests.engines.tiny import Rig

MAX_NUM_SEQS = 4
KV_BYTES = 32 << 20


@dataclass
class Case:
    """An engine under test; `rig` makes weights for it. Tests leave it awake, without requests, at any version."""

    kind: Callable[..., Engine]
    options: dict[str, Any]
    rig: Rig
    unfit: Rig

    @cached_property
    def engine(self) -> Engine:
        return self.start()

    def start(self, **more: Any) -> Engine:
        """One that begins with the visible version."""
        settings = {"max_num_seqs": MAX_NUM_SEQS, "kv_cache_bytes": KV_BYTES, "enable_prefix_caching": False}
        return self.rig.start(self.kind, structured=True, options=self.options, **settings, **more)

    @property
    def is_emulated(self) -> bool:
        return self.rig.folder == "emulated"

    @property
    def has_ranks(self) -> bool:
        """Which are processes of their own."""
        return isinstance(self.kind, partial)

    def update(self) -> int:
        """Other weights, loaded."""
        version = self.new_version()
        self.engine.load(self.rig.stored())
        return version

    def wake(self) -> dict[str, float]:
        """With the visible version."""
        return self.engine.wake(self.rig.stored())

    def new_version(self) -> int:
        number = self.rig.store.current() + 1
        with self.rig.store.write(number, 1) as writer:
            for name, entry in writer.entries.items():
                values = np.frombuffer(writer.buffer, np.float32, entry.nbytes // 4, entry.offset)
                values[:] = np.random.default_rng(number).normal(name.endswith("norm.weight"), 0.2, values.size)
        self.rig.store.seal(number)
        return number

    def probe(self) -> Probe:
        """What a trainer with the visible weights would ask."""
        with self.rig.read() as reader:
            return self._probe(reader)

    def _probe(self, reader: Reader) -> Probe:
        if self.is_emulated:
            token, logprob = greedy_answer(reader)
            return Probe(prompts=[[0]], tokens=[token], logprobs=[logprob], tolerance=0.0)
        import torch
        from transformers import AutoModelForCausalLM

        from stages.weights.tensors import views

        model = AutoModelForCausalLM.from_pretrained(self.rig.folder)
        model.load_state_dict(views(reader))
        prompts = [[5, 6, 7], [200, 3]]
        with torch.no_grad():
            best = [model(torch.tensor([p])).logits[0, -1].log_softmax(-1).max(-1) for p in prompts]
        return Probe(
            prompts=prompts,
            tokens=[int(b.indices) for b in best],
            logprobs=[float(b.values) for b in best],
            tolerance=1e-4,
        )


def a_request(id: str = "a", **changes: object) -> Request:
    return replace(Request(id=id, prompt_ids=[1, 70, 71, 72], max_tokens=12, seed=7), **changes)
