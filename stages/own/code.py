"""The user's own code, imported: by `module:name` or by `path/to/file.py:name`."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.stage import resolve


def load_function(path: str) -> Callable[..., Any]:
    """Raises whatever the user's module raises. A file is imported under its own name, once."""
    file, _, name = path.rpartition(":")
    if not file.endswith(".py"):
        return resolve(path)
    module_name = f"own_{Path(file).stem}"
    module = sys.modules.get(module_name)
    if module is None or module.__file__ != file:
        spec = importlib.util.spec_from_file_location(module_name, file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{file} cannot be imported")
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    found: Callable[..., Any] = getattr(module, name)
    return found


def score_of(value: Any) -> tuple[float, dict[str, float]]:
    """What verl's `compute_score` may return, a number or `{"score": number, ...}`: the score, and what else in it is
    a number. Raises ValueError for anything else."""
    if isinstance(value, dict):
        if "score" not in value:
            raise ValueError(f"it returned a dict without 'score': {sorted(map(str, value))[:8]}")
        others = {str(k): float(v) for k, v in value.items() if k != "score" and isinstance(v, bool | int | float)}
        return _number(value["score"]), others
    return _number(value), {}


def _number(value: Any) -> float:
    try:
        number = float(value)  # of numpy and torch too
    except (TypeError, ValueError):
        raise ValueError(f"it returned {type(value).__name__} {value!r:.80}, which is no number") from None
    if number != number or number in (float("inf"), float("-inf")):
        raise ValueError(f"it returned {number}, which is not finite")
    return number
