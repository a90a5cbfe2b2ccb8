"""The import of what a trainer needs, before a fork. Importing this file imports nothing heavy."""

import importlib

from stages.engines.vllm_start import hide_broken_packages

_MODULES = ("torch", "transformers", "accelerate", "stages.rl.trainer")


def preload() -> None:
    """Import it all. Afterwards the process still has one thread: it may fork."""
    hide_broken_packages()
    for name in _MODULES:
        importlib.import_module(name)
