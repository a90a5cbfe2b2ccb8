"""The user's exact checker: it measures the policy and the judge, and never gives a reward."""

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from pipeline.core.errors import StageFailed
from stages.own.code import load_function, score_of

RIGHT_ABOVE = 0.5
"""A checker's score above it says that the response is right."""


class ExactChecker:
    """`function` is module:name of verl's `compute_score(data_source, solution_str, ground_truth, extra_info)`."""

    def __init__(self, function: str) -> None:
        self._name = function
        try:
            self._compute_score: Callable[..., Any] = load_function(function)
        except (ImportError, AttributeError, OSError) as error:
            raise StageFailed(f"evaluate.function {function!r} cannot be imported: {error}") from error

    def is_right(
        self, data_source: str, response: str, ground_truth: Any, extra_info: Mapping[str, object] | None = None
    ) -> bool:
        """Raises StageFailed, naming what the user's code raised, if it fails."""
        try:
            found = self._compute_score(data_source, response, ground_truth, extra_info)
            score, _ = score_of(asyncio.run(found) if inspect.iscoroutine(found) else found)
            return score > RIGHT_ABOVE
        except Exception as error:  # user code: a border
            raise StageFailed(f"evaluate.function {self._name} failed on {response[:200]!r}: {error!r}") from error
