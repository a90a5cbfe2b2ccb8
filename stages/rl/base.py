"""The port behind which a trainer sits. Every trainer passes tests/contracts/test_trainer.py.

A trainer may be one of several *ranks*, each in a process of its own, numbered from 0. Then all ranks make the same
calls in the same order, at about the same time: any of them may wait for the others. All are given the whole batch and
return the same; rank 0 alone writes. A rank that fails alone leaves the others waiting: they are of no use without it.
"""

from typing import Protocol

from pipeline.gps.store import Store
from pipeline.queue.schema import SequenceRow
from pipeline.wire_shift import Probe

ASLEEP = "the trainer sleeps: wake it before anything but a save"


class Trainer(Protocol):
    version: int
    """The version of the weights that it holds: the number of steps applied."""

    def train(self, rows: list[SequenceRow], step: int) -> dict[str, float]:
        """One RL step on the recorded batch: `trainer.updates_per_step` optimizer steps. Requires
        step == version + 1; afterwards version == step. Returns the metrics (`actor/...`, `critic/...`). Raises
        StageFailed, before anything is changed, if a token is older than `algorithm.staleness` allows, or too new."""

    def probe(self) -> Probe:
        """The next greedy token and its logprob after a few fixed prompts, under the present weights."""

    def publish(self, store: Store, limit_s: float) -> None:
        """Copy the weights, under canonical (HF) names, as its version into its node's store, all ranks together;
        nobody sees it before it is sealed. Waits `limit_s` at most for the slot: WeightsUnavailable."""

    def save(self, uri: str) -> str:
        """Write a complete checkpoint `uri/step_<version>`; return its path. Idempotent. Also while it sleeps."""

    def sleep(self) -> None:
        """Give up the memory of its slots: weights, optimizer state and reference go to the host's, gradients are
        dropped. The process and its communicators stay. Needs no other rank. Afterwards only `save` and `wake` may be
        called: all else raises StageFailed. After an error it is awake and unchanged."""

    def wake(self) -> None:
        """The inverse, bit for bit. Needs no other rank. After an error it is of no use."""

    def load(self, path: str) -> None:
        """Continue from a complete checkpoint: weights, optimizer, random state, version. Any number of ranks of any
        strategy may have saved it, but those of an emulated trainer and of a real one."""
