"""A trainer without a model: its weights are a deterministic function of the batches that it trained. Numpy only.

For runs that test the machinery. `trainer.options`: `step_seconds` (how long a step takes), `raise_at` and `die_at`
(the step that raises, or kills the process), `once` (path of a marker file: where it exists the fault is over).
"""

import hashlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import load, save

from pipeline.checkpoint import Checkpoint, CheckpointStore
from pipeline.config import Config
from pipeline.core.errors import StageFailed, UpdateRefused
from pipeline.gps.segment import EMULATED_NAME, EMULATED_SIZE
from pipeline.gps.store import Reader, Writer
from pipeline.kill_points import kill_point
from pipeline.queue.schema import SequenceRow
from pipeline.wire_shift import Probe
from stages.rl.advantages import batch_advantages
from stages.rl.metrics import batch_metrics
from stages.rl.staleness import require_bounded

_UPDATE_SIZE = np.float32(0.01)
_OPTIONS = {"step_seconds", "raise_at", "die_at", "once"}


class EmulatedTrainer:
    """Behaves to its callers as HfTrainer does, and passes the same contract suite.

    Ranks need not talk to each other: each computes the same.
    """

    def __init__(self, config: Config, reader: Reader | None = None, rank: int = 0) -> None:
        if reader is not None and reader.version != 0:
            raise ValueError(f"a trainer starts from version 0 or a checkpoint, not from version {reader.version}")
        self._config = config
        self._rank = rank
        self._options = config.trainer.options
        if unknown := set(self._options) - _OPTIONS:
            raise ValueError(f"trainer.options {sorted(unknown)} are unknown; valid: {sorted(_OPTIONS)}")
        self.weights = np.zeros(EMULATED_SIZE, np.float32)
        self.version = 0

    def train(self, rows: list[SequenceRow], step: int) -> dict[str, float]:
        if step != self.version + 1:
            raise StageFailed(f"step {step} cannot be trained: the trainer holds version {self.version}")
        require_bounded(rows, self.version, self._config.algorithm.staleness)
        time.sleep(self._options.get("step_seconds", 0.0))
        self._fail_if_asked(step)
        advantages = batch_advantages(rows, self._config.algorithm)
        batch = hashlib.sha256(repr([(row.id, list(row.tokens), row.score) for row in rows]).encode()).digest()
        update = np.random.default_rng(np.frombuffer(batch, np.uint32)).standard_normal(EMULATED_SIZE, np.float32)
        self.weights = self.weights + _UPDATE_SIZE * update
        kill_point("train.between_updates")
        metrics = batch_metrics(rows, advantages, self.version)
        if self._config.correction == "decoupled":
            metrics |= {"actor/tis_weight_mean": 1.0, "actor/tis_clipfrac": 0.0, "actor/tis_ess": 1.0}
        self.version = step
        return metrics | {
            "actor/pg_loss": 0.0,
            "actor/pg_clipfrac": 0.0,
            "actor/ppo_kl": 0.0,
            "actor/kl_loss": 0.0,
            "actor/entropy": 0.0,
            "actor/grad_norm": float(np.linalg.norm(update)),
            "actor/lr": float(self._config.trainer.lr),
            "mismatch/max_abs_logprob_diff": 0.0,
            "mismatch/mean_abs_logprob_diff": 0.0,
            "train/nonfinite_updates": 0.0,
        }

    def probe(self) -> Probe:
        """Token 0, and as its logprob a function of all weights."""
        return Probe(prompts=[[0]], tokens=[0], logprobs=[-float(np.abs(self.weights).mean())], tolerance=1e-7)

    def publish(self, writer: Writer | None) -> None:
        if writer is None:
            return
        entry = writer.entries.get(EMULATED_NAME)
        if entry is None or len(writer.entries) > 1 or (entry.dtype, entry.shape) != ("F32", (EMULATED_SIZE,)):
            raise UpdateRefused(
                f"the weight store holds {sorted(writer.entries)}, not one F32 {EMULATED_NAME!r} of {EMULATED_SIZE}"
            )
        target, half = np.frombuffer(writer.buffer, np.float32, EMULATED_SIZE, entry.offset), EMULATED_SIZE // 2
        target[:half] = self.weights[:half]
        kill_point("publish.half")
        target[half:] = self.weights[half:]

    def save(self, uri: str) -> str:
        store = CheckpointStore(uri)
        return store.save(self.version, self._files()) if self._rank == 0 else store.path(self.version)

    def load(self, path: str) -> None:
        checkpoint = Checkpoint(path)
        self.weights = load(checkpoint.read("model/model.safetensors"))[EMULATED_NAME]
        self.version = checkpoint.read_json("state.json")["version"]

    def _files(self) -> Iterator[tuple[str, bytes]]:
        yield "model/model.safetensors", save({EMULATED_NAME: self.weights})
        yield "state.json", json.dumps({"version": self.version, "trainer": "emulated"}, indent=1).encode()

    def _fail_if_asked(self, step: int) -> None:
        if step not in (self._options.get("raise_at"), self._options.get("die_at")):
            return
        if once := self._options.get("once"):
            try:
                Path(once).touch(exist_ok=False)
            except FileExistsError:
                return
        if step == self._options.get("die_at"):
            os.kill(os.getpid(), signal.SIGKILL)
        raise StageFailed(f"trainer.options.raise_at: step {step}")
