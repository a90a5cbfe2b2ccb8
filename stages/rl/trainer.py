"""The trainer on Hugging Face models: GRPO with AdamW through accelerate, in one process or in several ranks.

Every rank is given the whole batch and trains its share of it; what it decides and says of a step is about all of it.

Strict repeatability: nothing random outlives a step (each reseeds from (run.seed, step)), dropout is off, so weights,
optimizer and version are the whole state. On one CPU thread a resumed run equals the uninterrupted one bit for bit.

Shape suffixes: B rows of a micro-batch, L padded length, T response tokens, V vocabulary, P probe prompts.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from safetensors.torch import load
from torch import Tensor
from torch.nn import Module

from pipeline.checkpoint import Checkpoint, CheckpointStore
from pipeline.config import Config
from pipeline.core.errors import RunError, StageFailed, UpdateRefused
from pipeline.gps.store import Reader, Store
from pipeline.kill_points import kill_point
from pipeline.queue.schema import SequenceRow
from pipeline.wire_shift import Probe
from stages.rl.advantages import batch_advantages
from stages.rl.base import ASLEEP
from stages.rl.batch import MicroBatch, Pass, Sample, pack, plan_passes, split_groups, to_sample
from stages.rl.correction import Correction
from stages.rl.lora import (
    adapt,
    adapter_config,
    adapter_tensors,
    frozen_state,
    merged_state,
    merging,
    restore_adapters,
    without_adapters,
)
from stages.rl.losses import kl_loss, token_logprobs
from stages.rl.metrics import batch_metrics, finite
from stages.rl.offload import Offload
from stages.rl.policy import base_tensors, build, canonical_tensors, description_files, digest
from stages.rl.ranks import Buckets, Ranks, averaging, cut_again, distribute, restore, syncing, whole, whole_on_host
from stages.rl.staleness import require_bounded
from stages.rl.state import Gather, Named, held_moments, image, optimizer_tensors, restore_optimizer, trained_parameters
from stages.rl.tally import Mismatch, Tally, update_metrics
from stages.weights.publisher import Publisher
from stages.weights.tensors import views

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_GPS_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_PROBE_TOLERANCES = {"float32": 1e-3, "bfloat16": 0.3, "float16": 0.3}
"""Two implementations of one model in bfloat16 differ by up to .23 on a token's logprob (SmolLM2-135M)."""
_PROBE_CANDIDATES, _PROBE_PROMPTS, _PROBE_LENGTH = 16, 4, 4


class HfTrainer:
    """Starts as the base model, version 0: from `reader` if given, else from the model's folder (the same bytes).

    `load` continues from a checkpoint. The reference of the KL term, if there is one, is always the base model.
    Where `ranks` are several, all of them call everything here, in the same order. While it sleeps its state is in the
    host's memory, on a CPU in files whose names begin with `offload_to` (see stages.rl.offload). `shares`: see
    Publisher.
    """

    def __init__(
        self,
        config: Config,
        reader: Reader | None = None,
        ranks: Ranks | None = None,
        offload_to: Path | None = None,
        shares: Path | None = None,
    ) -> None:
        if reader is not None and reader.version != 0:
            raise ValueError(f"a trainer starts from version 0 or a checkpoint, not from version {reader.version}")
        self._config = config
        self._ranks = ranks or Ranks()
        self._publisher = Publisher(self._ranks, shares)
        self._correction = Correction.of(config)
        self._spec = config.model.policy
        self._accelerator = Accelerator(
            cpu=not torch.cuda.is_available(), mixed_precision="bf16" if self._spec.dtype == "bfloat16" else "no"
        )
        base = views(reader) if reader is not None else base_tensors(self._spec)
        self._names = frozenset(base)
        trainer = config.trainer
        self.model = self._build(base)
        if trainer.lora is not None:
            adapt(self.model, config)
        distribute(self.model, config, self._accelerator)
        self._buckets = Buckets(in_order=config.is_strict)
        self._policy: Module | None = None
        self.reference: Module | None = None
        self._base_sha256 = ""
        if config.algorithm.kl.coef > 0 and trainer.lora is None:
            self.reference = distribute(self._build(base), config, self._accelerator, is_trained=False)
        if config.algorithm.kl.coef > 0 or trainer.lora is not None:
            self._base_sha256 = digest(base)
        self.optimizer = torch.optim.AdamW(
            trained_parameters(self.model).values(),
            lr=trainer.lr,
            betas=trainer.betas,
            weight_decay=trainer.weight_decay,
        )
        self.offload = Offload(self._accelerator.device, offload_to)
        self.version = 0
        self._nonfinite_in_a_row = 0
        self._unfinished_step: int | None = None

    def train(self, rows: list[SequenceRow], step: int) -> dict[str, float]:
        """One RL step, over whole groups; see `stages.rl.base.Trainer`. Raises StageFailed, and is unusable until
        the next `load`, when more than `trainer.max_nonfinite_steps` updates in a row were not finite."""
        self._require_whole()
        if step != self.version + 1:
            raise StageFailed(f"step {step} cannot be trained: the trainer holds version {self.version}")
        require_bounded(rows, self.version, self._config.algorithm.staleness)
        rows = sorted(rows, key=lambda row: row.id)
        advantages = batch_advantages(rows, self._config.algorithm)
        chosen = zip(rows, advantages.values_N.tolist(), advantages.used_N.tolist(), strict=True)
        samples = [to_sample(row, advantage) for row, advantage, is_used in chosen if is_used and row.num_sampled]
        seed = (self._config.run.seed, step)
        parts = split_groups(samples, self._config.trainer.updates_per_step, seed)

        torch.manual_seed(int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]))
        self._unfinished_step = step
        mismatch = Mismatch(self.version)
        if not parts:
            self._look_at([to_sample(row, 0.0) for row in rows if row.num_sampled], mismatch)
        # The first update's own forward pass shows its part under the weights of the start; here are the others.
        starts = [self._look_at(part, mismatch) for part in parts[1:]]
        tallies = [self._update(part, mismatch, None) for part in parts[:1]]
        tallies += [self._update(part, None, start) for part, start in zip(parts[1:], starts, strict=True)]
        self._cut_again()
        mismatch.share(self._ranks)
        metrics = batch_metrics(rows, advantages, self.version) | mismatch.metrics() | update_metrics(tallies)
        self._unfinished_step = None
        self.version = step
        return finite(metrics | {"actor/lr": float(self._config.trainer.lr)})

    def accumulate(
        self,
        samples: Sequence[Sample],
        mismatch: Mismatch | None = None,
        start: Sequence[Tensor] | None = None,
    ) -> Tally:
        """Add the gradient of the mini-batch's loss, the mean over all its response tokens, to the parameters'.

        Micro-batches only bound memory, and ranks only share the work: the divisor is the mini-batch's, so neither cut
        changes anything. `start`: the logprobs at the step's start, of each micro-batch; without it the present
        weights are those.
        """
        if self._policy is None:
            self._policy = averaging(self.model, self._config, self._buckets)
        tally = Tally(num_tokens=sum(len(sample.sampled) for sample in samples))
        last = len(self._plan(samples)) - 1
        for i, micro in enumerate(self._micro_batches(samples)):
            with syncing(self._policy, is_last=i == last):
                loss_T = self._loss(self._policy, micro, tally, mismatch, None if start is None else start[i])
                weight = 0 if micro.is_idle else self._ranks.num_ranks  # the ranks' gradients are averaged
                self._accelerator.backward(loss_T.sum() * weight / tally.num_tokens)
        tally.share(self._ranks)
        return tally

    def probe(self) -> Probe:
        """Of some fixed prompts, those whose greedy token leads by most: a near tie would prove nothing."""
        self._require_whole()
        vocab_size = self.model.config.get_text_config().vocab_size
        prompts_PL = np.random.default_rng(0).integers(0, vocab_size, (_PROBE_CANDIDATES, _PROBE_LENGTH))
        with torch.no_grad():
            ids_PL = torch.from_numpy(prompts_PL).to(self._accelerator.device)
            logits_PV = self.model(input_ids=ids_PL, use_cache=False).logits[:, -1].float()
        self._cut_again()
        best = torch.log_softmax(logits_PV, dim=-1).topk(2)
        lead_P = best.values[:, 0] - best.values[:, 1]
        chosen = sorted(lead_P.topk(_PROBE_PROMPTS).indices.tolist())
        return Probe(
            prompts=[prompts_PL[i].tolist() for i in chosen],
            tokens=best.indices[chosen, 0].tolist(),
            logprobs=best.values[chosen, 0].tolist(),
            tolerance=_PROBE_TOLERANCES[self._spec.dtype],
        )

    def publish(self, store: Store, limit_s: float) -> None:
        self._require_whole()
        wanted = _GPS_DTYPES[self._spec.dtype]
        if others := [name for name, entry in store.entries.items() if entry.dtype != wanted]:
            raise UpdateRefused(f"{', '.join(others[:4])}: the store's dtype is not {wanted}, which the policy has")
        self._publisher.publish(frozen_state(self.model), store, self.version, limit_s, merging(self.model))

    def save(self, uri: str) -> str:
        self._require_ended()
        store, files = CheckpointStore(uri), self._files()
        try:
            return store.save(self.version, files) if self._ranks.is_first else store.path(self.version)
        finally:
            if self._config.trainer.strategy == "fsdp2":
                for _ in files:  # the other ranks gather all of it, whatever the store did with it
                    pass
            if self.offload.is_holding:
                self.offload.trim()

    def sleep(self) -> None:
        self._require_awake()
        self.optimizer.zero_grad(set_to_none=True)
        self._cut_again()
        held = [tensor for model in self._models for tensor in (*model.parameters(), *model.buffers())]
        moments, to_come_bytes = held_moments(self.optimizer)
        self.offload.take([*held, *moments], self._buckets.tensors(), to_come_bytes)

    def wake(self) -> None:
        if not self.offload.is_holding:
            raise StageFailed("the trainer is awake")
        self.offload.give_back()

    def load(self, path: str) -> None:
        """Raises RunError where the checkpoint is damaged, or made with another base model as KL reference or below
        its adapters."""
        self._require_awake()
        checkpoint = Checkpoint(path)
        state = checkpoint.read_json("trainer/trainer.json")
        if state["base_sha256"] != self._base_sha256:
            raise RunError(
                f"{path} was trained with the base model (KL reference, adapters) {state['base_sha256'] or 'none'}; "
                f"{self._spec.path} with this config gives {self._base_sha256 or 'none'} (sha256 of the base model)"
            )
        master = "trainer/master.safetensors"
        if self._config.trainer.lora is not None:
            restore_adapters(self.model, load(checkpoint.read("adapter/adapter_model.safetensors")))
        else:
            weights = load(checkpoint.read(master if master in checkpoint else "model/model.safetensors"))
            restore(self.model, self._build(weights).state_dict())
        restore_optimizer(self.model, self.optimizer, load(checkpoint.read("trainer/optimizer.safetensors")))
        self.optimizer.zero_grad()  # of a step that broke off
        self.version = state["version"]
        self._nonfinite_in_a_row = state["nonfinite_in_a_row"]
        self._unfinished_step = None

    # --- parts -------------------------------------------------------------------------------------------------

    def _build(self, tensors: Mapping[str, Tensor]) -> Module:
        return build(self._spec, tensors, trust_remote_code=self._config.model.trust_remote_code)

    @property
    def _models(self) -> list[Module]:
        return [self.model] if self.reference is None else [self.model, self.reference]

    def _cut_again(self) -> None:
        """After each stage task, slept or not: ranks that sleep alone stay in step with the others."""
        for model in self._models:
            cut_again(model)

    def _require_awake(self) -> None:
        if self.offload.is_holding:
            raise StageFailed(ASLEEP)

    def _require_whole(self) -> None:
        self._require_awake()
        self._require_ended()

    def _require_ended(self) -> None:
        """A step that raised half-way left weights of no version: they are never served, saved or trained on."""
        if self._unfinished_step is not None:
            raise StageFailed(f"step {self._unfinished_step} was begun and not ended: load a checkpoint first")

    def _plan(self, samples: Sequence[Sample]) -> list[Pass]:
        """This rank's passes; every other rank has as many."""
        lengths = [sample.num_tokens for sample in samples]
        plans = plan_passes(lengths, self._config.trainer.micro_batch_tokens, self._ranks.num_ranks)
        return plans[self._ranks.rank]

    def _micro_batches(self, samples: Sequence[Sample]) -> Iterator[MicroBatch]:
        for rows, is_idle in self._plan(samples):
            yield pack([samples[i] for i in rows], self._accelerator.device, is_idle=is_idle)

    def _loss(
        self, policy: Module, micro: MicroBatch, tally: Tally, mismatch: Mismatch | None, start_T: Tensor | None
    ) -> Tensor:
        """loss_T. What it consists of is added to the tally and to the mismatch, if it counts."""
        kl = self._config.algorithm.kl
        tally, mismatch = (Tally(0), None) if micro.is_idle else (tally, mismatch)
        reference_T = self._reference_logprobs(micro) if kl.coef > 0 else None
        logprobs_T, entropy_T = self._logprobs(policy, micro)
        start_T = logprobs_T.detach() if start_T is None else start_T
        terms = self._correction.terms(logprobs_T, start_T, micro.behaviour_T, micro.advantages_T)
        loss_T = terms.loss_T
        if reference_T is not None:
            kl_T = kl_loss(logprobs_T, reference_T, kl.estimator)
            loss_T = loss_T + kl.coef * kl_T
            tally.kl += kl_T.sum().item()
        tally.loss += loss_T.sum().item()
        tally.add(terms, entropy_T)
        if mismatch is not None:
            mismatch.add(micro, logprobs_T)
        return loss_T

    @torch.no_grad()
    def _reference_logprobs(self, micro: MicroBatch) -> Tensor:
        """Of the base model: of the frozen weights, where adapters are trained."""
        if self.reference is not None:
            return self._logprobs(self.reference, micro)[0]
        with without_adapters(self.model):
            return self._logprobs(self.model, micro)[0]

    def _logprobs(self, model: Module, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """(logprobs_T, entropy_T) of the tempered distribution: the one that the tokens were sampled from."""
        num_kept = micro.ids_BL.shape[1] - micro.first
        logits_BLV = model(input_ids=micro.ids_BL, use_cache=False, logits_to_keep=num_kept).logits[:, -num_kept:]
        logits_TV = logits_BLV[micro.predicts_BL[:, micro.first :]]
        return token_logprobs(logits_TV.float() / self._config.rollout.temperature, micro.targets_T)

    @torch.no_grad()
    def _look_at(self, samples: Sequence[Sample], mismatch: Mismatch) -> list[Tensor]:
        """The present logprobs of each micro-batch, in the order in which `accumulate` takes them."""
        found = []
        for micro in self._micro_batches(samples):
            found.append(self._logprobs(self.model, micro)[0])
            if not micro.is_idle:
                mismatch.add(micro, found[-1])
        return found

    def _update(
        self, samples: Sequence[Sample], mismatch: Mismatch | None, start: Sequence[Tensor] | None
    ) -> Tally | None:
        """One optimizer step; None if its loss or gradient was not finite: then nothing changed."""
        limit = self._config.trainer.max_nonfinite_steps
        tally = self.accumulate(samples, mismatch, start)
        norm = self._accelerator.clip_grad_norm_(self.model.parameters(), self._config.trainer.grad_clip)
        tally.grad_norm = whole(norm).item()
        is_finite = math.isfinite(tally.loss) and math.isfinite(tally.grad_norm)
        if is_finite:
            self.optimizer.step()
        kill_point("train.between_updates")
        self.optimizer.zero_grad()
        self._nonfinite_in_a_row = 0 if is_finite else self._nonfinite_in_a_row + 1
        if self._nonfinite_in_a_row > limit:
            raise StageFailed(
                f"{self._nonfinite_in_a_row} updates in a row were not finite (loss {tally.loss}, gradient norm "
                f"{tally.grad_norm}); trainer.max_nonfinite_steps allows {limit}"
            )
        return tally if is_finite else None

    def _files(self) -> Iterator[tuple[str, bytes]]:
        """The checkpoint: `model/` loads with transformers as it is; `trainer/` is what training needs besides.

        Between two large files there is a small one: whoever writes them holds the one before while the next is made.
        """
        for name, data in description_files(self._spec):
            yield f"model/{name}", data
        yield "model/model.safetensors", self._weights(_DTYPES[self._spec.dtype])
        state = {
            "version": self.version,
            "nonfinite_in_a_row": self._nonfinite_in_a_row,
            "base_sha256": self._base_sha256,
        }
        yield "trainer/trainer.json", json.dumps(state, indent=1).encode()
        if self._config.trainer.lora is not None:
            about_adapter = adapter_config(self.model, self._config.trainer.lora, self._spec.path)
            yield "adapter/adapter_config.json", about_adapter
            yield "adapter/adapter_model.safetensors", self._image(partial(adapter_tensors, self.model), torch.float32)
        elif self._spec.dtype != "float32":
            yield "trainer/master.safetensors", self._weights(torch.float32)
        about = {"version": self.version, "trainer": self._config.trainer.strategy}
        yield "state.json", json.dumps(about, indent=1).encode()
        yield "trainer/optimizer.safetensors", self._image(self._moments, torch.float32)

    def _weights(self, dtype: torch.dtype) -> bytes:
        return self._image(lambda gather: canonical_tensors(merged_state(self.model, gather), self._names), dtype)

    def _moments(self, gather: Gather) -> Iterator[tuple[str, Tensor]]:
        return optimizer_tensors(self.model, self.optimizer, gather)

    def _image(self, named: Named, dtype: torch.dtype) -> bytes:
        if self.offload.is_holding:
            self.offload.trim()  # what the file before took
        return image(named, self._on_host, dtype, is_kept=self._ranks.is_first)

    def _on_host(self, tensor: Tensor) -> Tensor:
        """All of a tensor, in host memory: a save is the same asleep and awake, also where only some ranks sleep."""
        return whole_on_host(tensor, self.offload.on_host(tensor))
