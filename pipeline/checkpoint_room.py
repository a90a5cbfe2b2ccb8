"""Is there room on the disk for a run's checkpoints? Asked before anything starts: hours later is too late."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.core.errors import ConfigError
from pipeline.gps.room import needed_bytes
from pipeline.wording import amount

if TYPE_CHECKING:
    from pipeline.config import Config

_MOMENTS = 2
"""Of the optimizer, in float32, of each parameter."""


def checkpoint_bytes(config: "Config") -> int:
    """What one takes: the weights as they are served, in float32 where that is another type, and the moments."""
    policy = config.model.policy
    if config.trainer.lora is not None:  # the moments are the adapters' alone, and small
        return needed_bytes(policy.path, policy.dtype, 1)
    num_full = _MOMENTS + (policy.dtype != "float32")
    return needed_bytes(policy.path, policy.dtype, 1) + needed_bytes(policy.path, "float32", num_full)


def check_disk(config: "Config", folder: Path) -> None:
    """Raise ConfigError unless what the run in `folder` keeps, and the one that is being written, fits where it is
    written. Those that are there already have their room. Nothing is asked of a store behind a URL."""
    if "://" in config.checkpoint.uri:
        return
    place = Path(config.checkpoint.uri) if config.checkpoint.uri else folder / "checkpoints"
    kept = config.checkpoint.keep + 1
    missing = max(1, kept - len(list(place.glob("step_*"))))
    existing = next(path for path in (place, *place.absolute().parents) if path.exists())
    free, one = shutil.disk_usage(existing).free, checkpoint_bytes(config)
    if missing * one > free:
        raise ConfigError(
            f"checkpoints need {amount(missing * one)} ({missing} of {amount(one)}: checkpoint.keep {kept - 1} and the "
            f"one that is being written), but {existing} has {amount(free)} free: free some, or choose another place "
            "(run.root, --run-dir or checkpoint.uri) or a smaller checkpoint.keep"
        )
