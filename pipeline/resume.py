"""What may change when a run is resumed. It goes on as if it had never stopped, so nothing may change that alters its
data, their order, shapes or the loss."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.checks import EMULATED
from pipeline.compose import leaves
from pipeline.config import Config
from pipeline.core.errors import ConfigError
from pipeline.data_files import NoSuchFile, read_digest
from pipeline.run_folder import RunFolder, read_json, write_json

FREE = (
    "trainer.total_training_steps",
    "checkpoint",
    "tracking",
    "limits",
    "cluster",
    "gps",
    "evaluate",
    "placement",
    "data.val_files",
)
"""Keys, and whole sections, that may change. Any other may not: a new key is safe until somebody has thought of it."""
FREE_UNLESS_STRICT = (
    "trainer.micro_batch_tokens",
    "trainer.ranks",
    "trainer.strategy",
    "rollout.flush_s",
    "rollout.engine.kv_cache_bytes",
    "rollout.engine.max_num_seqs",
    "reward.genrm.engine.kv_cache_bytes",
    "reward.genrm.engine.max_num_seqs",
)
"""They change what is computed together, and by that the last bits of a sum."""

_MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
_WHOLE_BYTES = 64 << 20
_NUM_SAMPLES, _SAMPLE_BYTES = 64, 1 << 20

Digests = dict[str, dict[str, str]]
"""Key of the configuration to the files that it names, each with the digest of its content."""


def check_changes(run: RunFolder, before: Config, after: Config) -> None:
    """Raise ConfigError with all keys that may not change and did: their value, or what the files they name hold."""
    wrong = [*_changed_values(before, after), *_changed_inputs(read_json(run.inputs) or {}, before)]
    if wrong:
        free = FREE if before.is_strict else (*FREE, *FREE_UNLESS_STRICT)
        raise ConfigError(
            "a resumed run keeps what alters its data, their order, shapes or the loss; this would change:\n  "
            + "\n  ".join(wrong)
            + f"\nfree to change are {', '.join(free)}; for anything else start a new run"
        )


def keep_inputs(run: RunFolder, config: Config) -> None:
    """At submit: what the files hold that the run is made of."""
    write_json(run.inputs, _digests(config))


def _changed_values(before: Config, after: Config) -> Iterator[str]:
    old, new = (dict(leaves(config.model_dump(mode="json"))) for config in (before, after))
    free = FREE if before.is_strict else (*FREE, *FREE_UNLESS_STRICT)
    for path in dict.fromkeys((*old, *new)):
        key, values = ".".join(path), (old.get(path), new.get(path))
        is_free = any(key == name or key.startswith(f"{name}.") for name in free)
        is_other_trainer = key == "trainer.strategy" and "emulated" in values
        if values[0] != values[1] and (is_other_trainer or not is_free):
            change = f"{key} from {_short(values[0])} to {_short(values[1])}"
            yield f"{change}: an emulated trainer has no real weights" if is_other_trainer else change


def _changed_inputs(known: Digests, config: Config) -> Iterator[str]:
    now = _digests(config) if known else {}
    for key, files in known.items():
        for file in dict.fromkeys((*files, *now[key])):
            if file not in now[key]:
                yield f"{key}: {file} is gone"
            elif file not in files:
                yield f"{key}: {file} is new"
            elif now[key][file] != files[file]:
                yield f"{key}: {file} has another content than at submit"


def _digests(config: Config) -> Digests:
    """Of the training data and of both models; what is gone is left out. Raises DataError if that cannot be known."""
    found: Digests = {"data.train_files": {}}
    for file in config.data.train_files:
        try:
            found["data.train_files"][file] = read_digest(file)
        except NoSuchFile:
            continue
    for name, model in (("policy", config.model.policy), ("genrm", config.judge_model)):
        if model is None:
            continue
        folder = Path(model.path)
        files = sorted(file for form in _MODEL_FILES for file in folder.glob(form)) if model.path != EMULATED else []
        found[f"model.{name}.path"] = {str(file): _model_digest(file) for file in files}
    return found


def _model_digest(path: Path) -> str:
    """SHA-256 of the file; of a large one, of its size and samples of it: reading all of it would take minutes."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with open(path, "rb") as file:
        if size <= _WHOLE_BYTES:
            digest.update(file.read())
        else:
            for sample in range(_NUM_SAMPLES):
                file.seek(sample * (size - _SAMPLE_BYTES) // (_NUM_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
