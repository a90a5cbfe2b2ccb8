"""How good the judge is, counted beside the training with an exact checker. Nothing of it reaches the reward."""

from collections import Counter

from pipeline.queue.schema import SequenceRow
from stages.exact import ExactChecker


class Measurement:
    """Counts the responses that the checker calls wrong or right, and those of them that the judge did not.

    A response that was cut off is wrong, whatever it says. One without ground truth is not counted, nor is one whose
    judge failed. A score above `middle` is the judge's "right".
    """

    def __init__(self, checker: ExactChecker, middle: float) -> None:
        self.counts: Counter[str] = Counter()
        self._checker = checker
        self._middle = middle

    def add(self, row: SequenceRow, response: str, score: float) -> None:
        if not row.ground_truth:
            return
        is_right = row.finish == "stop" and self._checker.is_right(row.data_source, response, row.ground_truth)
        is_judged_right = score > self._middle
        self.counts["num_correct" if is_right else "num_wrong"] += 1
        if is_judged_right != is_right:
            self.counts["num_false_positive" if is_judged_right else "num_false_negative"] += 1
