"""The stages of the train workers: train, publish, checkpoint. All run on a worker's main thread, one at a time.

Each rank has a task of its own of each; rank 0 speaks for all of them, and writes.
"""

import time
from dataclasses import replace

import msgspec
import numpy as np

from pipeline.checkpoint import store_of
from pipeline.core.errors import Fenced, StageFailed
from pipeline.kill_points import kill_point
from pipeline.queue.schema import SequenceRow
from pipeline.stage import StageResult, StageSpec, TaskContext
from stages.group import collective


@collective
def train(task: TaskContext, spec: StageSpec) -> StageResult:
    """Train the recorded batch of `spec.step`."""
    worker = task.worker
    rows = worker.queue.batch(spec.step)
    check_rows(rows)
    if worker.config.reward.permute_verdicts:
        rows = permute_verdicts(rows, (worker.config.run.seed, spec.step))
    kill_point("train.before")
    metrics = worker.trainer.train(rows, spec.step)
    check_mismatch(metrics, worker.config.algorithm.max_logprob_diff)
    kill_point("train.after")
    task.log(f"step {spec.step}: trained {len(rows)} sequences, {metrics['train/num_tokens']:.0f} tokens in the loss")
    return {"metrics": metrics if worker.rank == 0 else {}}


@collective
def publish(task: TaskContext, spec: StageSpec) -> StageResult:
    """Write version `spec.version` into the weight store of rank 0's node (its seal is the agent's), and say how to
    recognise it.

    A replica that is being started may hold the slot for as long as a start may take.
    """
    worker = task.worker
    if worker.trainer.version != spec.version:
        raise StageFailed(f"version {spec.version} cannot be published: the trainer holds {worker.trainer.version}")
    kill_point("publish.begin")
    limits = worker.config.limits
    began = time.monotonic()
    worker.trainer.publish(worker.policy, limits.publish_s + limits.engine_start_s)
    write_s = time.monotonic() - began
    kill_point("publish.written")
    probe = worker.trainer.probe()
    if worker.rank:
        return {"metrics": {}}
    metrics = {"gps/write_s": write_s, "gps/write_gbps": worker.policy.gigabytes / write_s}
    return {"metrics": metrics, "probe": msgspec.to_builtins(probe)}


@collective
def checkpoint(task: TaskContext, spec: StageSpec) -> StageResult:
    """Save what the trainer holds, then remove old checkpoints.

    The trainer names the version: the controller may know of an older one when it asks for a last save. Raises Fenced
    if a newer attempt of the run has begun: the checkpoints are its own now.
    """
    worker = task.worker
    newest_attempt = max(worker.run.attempts(), default=spec.attempt)
    if newest_attempt > spec.attempt:
        raise Fenced(f"attempt {spec.attempt} may not save: attempt {newest_attempt} of {worker.run.path} has begun")
    store = store_of(worker.run, worker.config)
    path = worker.trainer.save(store.uri)
    if worker.rank > 0:
        return {"metrics": {}}
    removed = store.prune(worker.config.checkpoint.keep)
    task.log(f"saved {path}" + (f"; removed {', '.join(removed)}" if removed else ""))
    return {"metrics": {}, "version": worker.trainer.version, "path": path}


def check_mismatch(metrics: dict[str, float], allowed: float) -> None:
    """The engine answered under the weights that the trainer had: else an update went wrong. Raises StageFailed."""
    difference = metrics.get("mismatch/max_abs_logprob_diff", 0.0)
    if allowed and difference > allowed:
        raise StageFailed(
            f"trainer and engine differ by {difference:.3g} on the logprob of a token of this step, "
            f"algorithm.max_logprob_diff allows {allowed:g}: they do not hold the same weights"
        )


def check_rows(rows: list[SequenceRow]) -> None:
    """Each sequence once, each token with its id, logprob and versions. Raises StageFailed that names the sequence."""
    seen: set[str] = set()
    for row in rows:
        lengths = (len(row.tokens), len(row.logprobs), len(row.versions), len(row.kv_versions))
        if len(set(lengths)) != 1:
            text = "sequence {}: {} tokens, {} logprobs, {} versions, {} versions of caches"
            raise StageFailed(text.format(row.id, *lengths))
        if not row.prompt_ids or min(row.prompt_ids) < 0 or min(row.tokens, default=0) < 0:
            raise StageFailed(f"sequence {row.id}: its prompt is empty, or an id is negative")
        if row.id in seen:
            raise StageFailed(f"sequence {row.id} is twice in the batch")
        seen.add(row.id)


def permute_verdicts(rows: list[SequenceRow], seed: tuple[int, int]) -> list[SequenceRow]:
    """The rows, with the verdicts of all of them dealt out again at random."""
    order = np.random.default_rng(seed).permutation(len(rows))
    return [replace(row, score=rows[i].score, failure=rows[i].failure) for row, i in zip(rows, order, strict=True)]
