"""A trainer without a model: its weights are a deterministic function of the batches that it trained. Numpy only.

For runs that test the machinery. `trainer.options`:

    step_seconds, profile, ...      how long it takes (pipeline.emulation.TrainTiming)
    holds_bytes                     memory that it has while it is awake, beside its few weights
    raise_at, die_at                the step that raises, or kills the process
    fault                           die_in_sleep, die_in_wake, hang_in_sleep, hang_in_wake, refuse_wake, or leak (its
                                    memory stays, asleep or not)
    once                            path of a marker file: where it exists each fault is over
"""

import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import load, save

from pipeline.checkpoint import Checkpoint, CheckpointStore
from pipeline.config import Config
from pipeline.core.errors import StageFailed, UpdateRefused
from pipeline.emulation import TrainTiming
from pipeline.gps.segment import EMULATED_NAME, EMULATED_SIZE
from pipeline.gps.store import Reader, Store
from pipeline.kill_points import kill_point
from pipeline.queue.schema import SequenceRow
from pipeline.wire_shift import Probe
from stages.ballast import Ballast
from stages.rl.advantages import batch_advantages
from stages.rl.base import ASLEEP
from stages.rl.host_memory import SharedFile
from stages.rl.metrics import batch_metrics
from stages.rl.staleness import require_bounded

_UPDATE_SIZE = np.float32(0.01)
_FAULTS = {"die_in_sleep", "die_in_wake", "hang_in_sleep", "hang_in_wake", "refuse_wake", "leak"}
_OPTIONS = {*TrainTiming.model_fields, "holds_bytes", "raise_at", "die_at", "fault", "once"}


class EmulatedTrainer:
    """Behaves to its callers as HfTrainer does, and passes the same contract suite.

    Ranks need not talk to each other: each computes the same. `offload_to`: as in HfTrainer.
    """

    def __init__(
        self, config: Config, reader: Reader | None = None, rank: int = 0, offload_to: Path | None = None
    ) -> None:
        if reader is not None and reader.version != 0:
            raise ValueError(f"a trainer starts from version 0 or a checkpoint, not from version {reader.version}")
        self._config = config
        self._rank = rank
        self._options = config.trainer.options
        if unknown := set(self._options) - _OPTIONS:
            raise ValueError(f"trainer.options {sorted(unknown)} are unknown; valid: {sorted(_OPTIONS)}")
        if self._options.get("fault", "leak") not in _FAULTS:
            raise ValueError(f"trainer.options.fault is {self._options['fault']}; valid: {sorted(_FAULTS)}")
        self._timing = TrainTiming.model_validate(
            {name: value for name, value in self._options.items() if name in TrainTiming.model_fields}
        )
        self.weights = np.zeros(EMULATED_SIZE, np.float32)
        self.version = 0
        self._offload_to = offload_to
        self._away: SharedFile | None = None
        self._is_asleep = False
        self._ballast: Ballast | None = self._hold()

    def train(self, rows: list[SequenceRow], step: int) -> dict[str, float]:
        self._require_awake()
        if step != self.version + 1:
            raise StageFailed(f"step {step} cannot be trained: the trainer holds version {self.version}")
        require_bounded(rows, self.version, self._config.algorithm.staleness)
        began = time.monotonic()
        if step in (self._options.get("raise_at"), self._options.get("die_at")) and self._is_due():
            if step == self._options.get("die_at"):
                os.kill(os.getpid(), signal.SIGKILL)
            raise StageFailed(f"trainer.options.raise_at: step {step}")
        advantages = batch_advantages(rows, self._config.algorithm)
        batch = hashlib.sha256(repr([(row.id, list(row.tokens), row.score) for row in rows]).encode()).digest()
        update = np.random.default_rng(np.frombuffer(batch, np.uint32)).standard_normal(EMULATED_SIZE, np.float32)
        self.weights = self.weights + _UPDATE_SIZE * update
        kill_point("train.between_updates")
        metrics = batch_metrics(rows, advantages, self.version)
        if self._config.correction == "decoupled":
            metrics |= {"actor/tis_weight_mean": 1.0, "actor/tis_clipfrac": 0.0, "actor/tis_ess": 1.0}
        self.version = step
        seconds = self._timing.step_s([(len(row.prompt_ids), len(row.tokens)) for row in rows], began)
        time.sleep(max(0.0, began + seconds - time.monotonic()))
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
        self._require_awake()
        return Probe(prompts=[[0]], tokens=[0], logprobs=[-float(np.abs(self.weights).mean())], tolerance=1e-7)

    def publish(self, store: Store, limit_s: float) -> None:
        self._require_awake()
        if self._rank:
            return
        entry = store.entries.get(EMULATED_NAME)
        if entry is None or len(store.entries) > 1 or (entry.dtype, entry.shape) != ("F32", (EMULATED_SIZE,)):
            raise UpdateRefused(
                f"the weight store holds {sorted(store.entries)}, not one F32 {EMULATED_NAME!r} of {EMULATED_SIZE}"
            )
        with store.write(self.version, limit_s) as writer:
            target, half = np.frombuffer(writer.buffer, np.float32, EMULATED_SIZE, entry.offset), EMULATED_SIZE // 2
            target[:half] = self.weights[:half]
            kill_point("publish.half")
            target[half:] = self.weights[half:]

    def save(self, uri: str) -> str:
        store = CheckpointStore(uri)
        return store.save(self.version, self._files()) if self._rank == 0 else store.path(self.version)

    def sleep(self) -> None:
        self._require_awake()
        time.sleep(self._timing.sleep_s)
        if self._away is None:
            self._away = SharedFile(self._offload_to)
        self._away.reserve(self.weights.nbytes)
        self._away.write(0, memoryview(self.weights).cast("B"))
        kill_point("down.offload")
        self._fail_if_asked("die_in_sleep")
        self._fail_if_asked("hang_in_sleep")
        self._is_asleep = True
        self.weights = np.empty(0, np.float32)
        if self._ballast is not None and not self._is_asked("leak"):
            self._ballast.close()
            self._ballast = None

    def wake(self) -> None:
        if not self._is_asleep:
            raise StageFailed("the trainer is awake")
        time.sleep(self._timing.wake_s)
        kill_point("up.restore")
        self._fail_if_asked("die_in_wake")
        self._fail_if_asked("hang_in_wake")
        self._fail_if_asked("refuse_wake")
        self.weights = self._weights()
        self._ballast = self._ballast or self._hold()
        self._is_asleep = False

    def load(self, path: str) -> None:
        self._require_awake()
        checkpoint = Checkpoint(path)
        self.weights = load(checkpoint.read("model/model.safetensors"))[EMULATED_NAME]
        self.version = checkpoint.read_json("state.json")["version"]

    def _files(self) -> Iterator[tuple[str, bytes]]:
        yield "model/model.safetensors", save({EMULATED_NAME: self._weights()})
        yield "state.json", json.dumps({"version": self.version, "trainer": "emulated"}, indent=1).encode()

    def _weights(self) -> np.ndarray:
        if self._away is None or not self._is_asleep:
            return self.weights
        weights = np.empty(EMULATED_SIZE, np.float32)
        self._away.read(0, memoryview(weights).cast("B"))
        return weights

    def _hold(self) -> Ballast:
        return Ballast(self._options.get("holds_bytes", 0))

    def _require_awake(self) -> None:
        if self._is_asleep:
            raise StageFailed(ASLEEP)

    def _fail_if_asked(self, fault: str) -> None:
        if not self._is_asked(fault):
            return
        if fault.startswith("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.startswith("hang"):
            threading.Event().wait()
        raise StageFailed(f"trainer.options.fault: {fault}")

    def _is_asked(self, fault: str) -> bool:
        return self._options.get("fault") == fault and self._is_due()

    def _is_due(self) -> bool:
        """Each time, or `once`."""
        if once := self._options.get("once"):
            try:
                Path(once).touch(exist_ok=False)
            except FileExistsError:
                return False
        return True
