"""Tiny models with random weights, and a rig to run one: a weight store and engines that read it.

`dense` and `tied` are Qwen3, `moe` is Qwen3-MoE, all in float32 with 259 tokens (3 control tokens and the bytes).
`wide` is `dense` with layers as large as those of real models: 20 MB in all.
The first engine of a process must be the MoE's, if there is one: vLLM sets up groups of experts only once.
"""

import gc
import os
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config_engine import EngineOptions
from pipeline.gps.store import Reader, Store
from stages.engines import vllm_start
from stages.engines.base import Engine, Output, Request, Stored

if TYPE_CHECKING:
    import torch

VOCAB_SIZE = 259
MAX_MODEL_LEN = 512
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # what vLLM's attention on a CPU takes
    "intermediate_size": 128,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WIDE = {"hidden_size": 512, "intermediate_size": 1536}
_EXPERTS = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}


def load_vllm(cache: Path) -> None:
    """Import vLLM once for this process, as a zygote does."""
    os.environ.update(vllm_start.environment(str(cache)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        vllm_start.preload()


def make_model(kind: str, folder: Path) -> Any:
    """A transformers model, also saved in `folder`, with a tokenizer of bytes."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(1)
    if kind == "wide":
        model = Qwen3ForCausalLM(Qwen3Config(**_SHAPE | _WIDE, tie_word_embeddings=False))
    elif kind == "moe":
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SHAPE, **_EXPERTS, tie_word_embeddings=False))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**_SHAPE, tie_word_embeddings=kind == "tied"))
    model.save_pretrained(folder)
    _byte_tokenizer().save_pretrained(folder)
    return model.eval()


def _byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # The byte-level alphabet spells byte b as one character: in the order of bytes, ids are b + 3.
    spelt = {pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(chr(b))[0][0]: b for b in range(128)}
    others = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - spelt.keys())
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2}
    vocab |= {character: byte + 3 for character, byte in spelt.items()}
    vocab |= {character: 131 + number for number, character in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", chat_template="{{ messages }}"
    )


@dataclass
class Rig:
    """A store with versions of a model, and engines that were made from it."""

    folder: str
    store: Store
    dtype: str = "float32"
    engines: list[Engine] = field(default_factory=list)

    @classmethod
    def create(cls, folder: Path | str, dtype: str = "float32") -> "Rig":
        name = f"pivot-{os.getuid()}-test{uuid.uuid4().hex[:12]}-1-n0-policy"
        return cls(str(folder), Store.create(name, str(folder), dtype, 0), dtype)

    def start(
        self,
        kind: Callable[..., Engine],
        *,
        seed: int = 0,
        structured: bool = False,
        can_sleep: bool = True,
        ranks: int = 1,
        **options: Any,
    ) -> Engine:
        """An engine with the visible version."""
        settings = EngineOptions(**({"kv_cache_bytes": 32 << 20} | options))
        flags = {"structured": structured, "can_sleep": can_sleep} | ({"ranks": ranks} if ranks > 1 else {})
        engine = kind(self.folder, self.dtype, settings, MAX_MODEL_LEN, self.stored(), seed, **flags)
        self.engines.append(engine)
        return engine

    def stored(self) -> Stored:
        """The visible version."""
        return Stored(store=self.store, version=self.store.current(), wait_s=1)

    def read(self) -> Reader:
        return self.store.read(self.store.current(), 1)

    def publish(self, write: Callable[[dict[str, "torch.Tensor"]], None]) -> int:
        """A new version whose tensors `write` fills in place."""
        from stages.weights.tensors import views

        version = self.store.current() + 1
        with self.store.write(version, 1) as writer:
            write(views(writer))
        self.store.seal(version)
        return version

    def randomise(self, seed: int) -> int:
        """A new version with other values everywhere. They never were in memory outside of the store."""
        import torch

        def write(tensors: dict[str, torch.Tensor]) -> None:
            generator = torch.Generator().manual_seed(seed)
            for name, tensor in tensors.items():
                mean = 1.0 if name.endswith("norm.weight") else 0.0
                tensor.normal_(mean, 0.2, generator=generator)

        return self.publish(write)

    def close(self) -> None:
        while self.engines:
            self.engines.pop().close()
        self.store.unlink()


@contextmanager
def one_collection() -> Iterator[None]:
    """vLLM ends each engine with two collections of all that was ever imported; for many engines, one is enough."""
    unfreeze = gc.unfreeze
    gc.freeze()
    gc.unfreeze = lambda: None
    try:
        yield
    finally:
        gc.unfreeze = unfreeze
        gc.unfreeze()
        gc.collect()


def run(engine: Engine, requests: Sequence[Request]) -> dict[str, Output]:
    """Run requests to their end; what each said in all."""
    for request in requests:
        engine.add(request)
    return drain(engine)


def drain(engine: Engine) -> dict[str, Output]:
    said: dict[str, Output] = {}
    while engine.has_unfinished():
        collect(said, engine.step())
    return said


def collect(said: dict[str, Output], outputs: Sequence[Output]) -> None:
    """Add new outputs to what was said; a request that has finished says no more."""
    for new in outputs:
        old = said.get(new.id, Output(id=new.id, version=new.version))
        assert not old.finish
        said[new.id] = Output(
            id=new.id,
            version=new.version,
            kv_version=new.kv_version,
            tokens=old.tokens + new.tokens,
            logprobs=old.logprobs + new.logprobs,
            finish=new.finish,
        )


def private_bytes() -> int:
    """Memory that this process has for itself, as the kernel counts it."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    (kib,) = (line.split()[1] for line in lines if line.startswith("Private_Dirty:"))
    return int(kib) << 10
