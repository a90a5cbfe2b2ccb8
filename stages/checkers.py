"""Rule rewards: exact checkers with the signature of verl's `compute_score`, named by dotted path in a config."""

from collections.abc import Mapping


def digit_sort(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, object] | None = None
) -> float:
    """1.0 if what follows the last ';' of the response is exactly the sorted digits, else 0.0.

    A response is any number of drafts and one answer, separated by ';'. Nothing is stripped: a trailing space is a
    wrong answer. `data_source` and `extra_info` belong to the signature and are not read.
    """
    return float(solution_str.rsplit(";", 1)[-1] == ground_truth)
