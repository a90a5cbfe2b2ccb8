"""What the emulated engines and the emulated trainer of a run must have said, computed again from what its queue holds.

The weights of each version follow from the recorded batches before it; the logprob of each token follows from the
weights of the version that it bears. So a replica that answered with weights which it had before it slept, a token that
was trained and is not the one in the queue, or a batch in another order, all show.
"""

import hashlib
import zlib
from pathlib import Path

import numpy as np
from safetensors.numpy import load

from pipeline.checkpoint import Checkpoint, CheckpointStore
from pipeline.config import Config
from pipeline.gps.segment import EMULATED_NAME, EMULATED_SIZE, plan_image
from pipeline.queue.schema import SequenceRow
from stages.engines.stream import logprob_at
from tests.scenarios.runs import sequences

_UPDATE_SIZE = np.float32(0.01)


def contradictions(path: Path, config: Config) -> list[str]:
    """Of an ended run in its default mode of determinism or the strict one."""
    steps = sequences(path)
    weights = {0: np.zeros(EMULATED_SIZE, np.float32)}
    for step in range(1, config.trainer.total_training_steps + 1):
        weights[step] = _train(weights[step - 1], [row for row in steps[step] if row.state == "trained"])
    contents = {version: _content(weights[version]) for version in weights}
    found = [text for rows in steps.values() for row in rows for text in _of_sequence(row, contents, config)]
    store = CheckpointStore(config.checkpoint.uri or str(path / "checkpoints"))
    for step in store.complete():
        held = load(Checkpoint(store.path(step)).read("model/model.safetensors"))[EMULATED_NAME]
        if not np.array_equal(held, weights[step]):
            found.append(f"checkpoint {step} holds other weights than its batches make")
    return found


def _train(weights: np.ndarray, rows: list[SequenceRow]) -> np.ndarray:
    batch = hashlib.sha256(repr([(row.id, list(row.tokens), row.score) for row in rows]).encode()).digest()
    update = np.random.default_rng(np.frombuffer(batch, np.uint32)).standard_normal(EMULATED_SIZE, np.float32)
    trained: np.ndarray = weights + _UPDATE_SIZE * update
    return trained


def _content(weights: np.ndarray) -> int:
    image = plan_image("emulated", "float32")
    whole = bytearray(image.nbytes)
    whole[: len(image.header)] = image.header
    at = image.entries[EMULATED_NAME].offset
    whole[at : at + weights.nbytes] = weights.tobytes()
    return zlib.crc32(whole)


def _of_sequence(row: SequenceRow, contents: dict[int, int], config: Config) -> list[str]:
    """R23: length and stop count from the whole sequence; R18, R21, R25: each logprob is that of the weights named."""
    found = []
    most = config.rollout.max_response_length
    if row.state == "trained":
        if len(row.tokens) > most or (row.finish == "length") != (len(row.tokens) == most and row.tokens[-1] != 2):
            found.append(f"{row.id}: {len(row.tokens)} tokens, finish {row.finish}")
        if 2 in row.tokens[:-1]:
            found.append(f"{row.id} goes on after its stop token")
    for at, (token, logprob, version) in enumerate(zip(row.tokens, row.logprobs, row.versions, strict=True)):
        expected = np.float32(logprob_at(version, contents[version], len(row.prompt_ids) + at, token))
        if np.float32(logprob) != expected:
            found.append(f"{row.id}: token {at} of version {version} has logprob {logprob}, not {expected}")
            break
    return found
