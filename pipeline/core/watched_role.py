"""An inference role as the monitor sees it: what runs, what waits, and what was learned of costs and lengths."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate

from pipeline.core.length_model import Ages, LengthModel, add_ages
from pipeline.core.recent import Rate, RecentMean
from pipeline.core.reports import QueueReport, ReplicaReport
from pipeline.core.snapshot import Crowd, RoleView
from pipeline.core.throughput import Throughput

_BELIEVED_PROMPTS = 16.0
"""A group: its prompts are alike, so the first group alone would say little."""


class WatchedRole:
    def __init__(self, believed: RoleView, at_s: float, num_sequences: int) -> None:
        self.believed = believed
        self.lengths = LengthModel(believed.bin_tokens, believed.survival)
        self.throughput = Throughput(believed.cost, at_s)
        self.prompt = RecentMean(believed.prompt_tokens, weight=_BELIEVED_PROMPTS, memory=2 * num_sequences)
        self.prefill = RecentMean(believed.prefill_tokens, weight=_BELIEVED_PROMPTS, memory=2 * num_sequences)
        self.replicas: dict[int, ReplicaReport] = {}
        self.queue: QueueReport | None = None
        self.came, self.ended, self.tokens = Rate(at_s), Rate(at_s), Rate(at_s)

    def measure(self, report: ReplicaReport) -> None:
        if report.num_iterations:
            self.throughput.add_decode(
                report.at_s, report.num_iterations, report.decode_s, report.batch, report.context
            )
            self.tokens.add(report.at_s, report.num_iterations * report.batch)
        if report.prefill_tokens:
            self.throughput.add_prefill(report.prefill_tokens, report.prefill_s)
        if report.num_started:
            self.prompt.add(report.started_tokens, report.num_started)
            self.prefill.add(report.started_prefill_tokens, report.num_started)

    def empty(self, block: int) -> None:
        self.replicas = {index: report for index, report in self.replicas.items() if report.block != block}

    @property
    def ages(self) -> dict[int, Ages]:
        waiting = [self.queue.ages] if self.queue else []
        return add_ages([*(report.ages for report in self.replicas.values()), *waiting])

    @property
    def num_running(self) -> int:
        return sum(report.num_running for report in self.replicas.values())

    @property
    def num_waiting(self) -> float:
        queue = self.queue
        return sum(queue.num_fresh.values()) + sum(map(sum, queue.ages.values())) if queue else 0.0

    @property
    def rest_tokens(self) -> float:
        """What one that runs has before it, on average; where none runs, at the mean age of those that will."""
        survival = self.lengths.survival(self.ages.values())
        ages = [sum(counts) for counts in zip(*self.ages.values(), strict=True)] or list(survival[:-1])
        if not any(ages):
            ages = list(survival[:-1])
        beyond = list(accumulate(reversed(survival)))[::-1]
        width, num = self.believed.bin_tokens, sum(ages)
        rest = [
            count * max(1.0, width * (beyond[i] / survival[i] - 0.5)) if survival[i] > 0 else count
            for i, count in enumerate(ages)
        ]
        return float(sum(rest) / num)

    def view(self, steps: Iterable[int]) -> RoleView:
        ages, fresh = self.ages, self.queue.num_fresh if self.queue else {}
        none = (0.0,) * (len(self.believed.survival) - 1)
        return replace(
            self.believed,
            cost=self.throughput.cost,
            prompt_tokens=self.prompt.value,
            prefill_tokens=self.prefill.value,
            survival=self.lengths.survival(ages.values()),
            crowds=tuple(Crowd(step=step, num_waiting=fresh.get(step, 0), ages=ages.get(step, none)) for step in steps),
        )
