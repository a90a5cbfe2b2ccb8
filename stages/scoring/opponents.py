"""Who a response is compared with: others to the same prompt, which are all there when the first of them is judged."""

from collections.abc import Sequence
from typing import Any

from pipeline.config import Config
from pipeline.queue.schema import SequenceRow, sequence_id
from stages.serving import seed_of
from stages.text import decode_response, load_tokenizer


class Opponents:
    """Each ordered pair is asked about once, so that of what a judge gives to whoever comes first all have the same."""

    def __init__(self, config: Config, worker: Any) -> None:
        assert config.reward.genrm is not None
        self._seed, self._n = config.run.seed, config.rollout.n
        self._most = config.reward.genrm.opponents
        self._queue = worker.queue
        self._policy = load_tokenizer(config.model.policy.path, config.model.trust_remote_code)
        self._texts: dict[str, str] = {}

    def of(self, row: SequenceRow) -> Sequence[str]:
        """The texts that it is compared with, the same for every try."""
        others = [sequence_id(row.step, row.prompt_no, m) for m in range(self._n) if m != row.member]
        if self._most:
            others = sorted(others, key=lambda other: seed_of(self._seed, row.id, other))[: self._most]
        if unknown := [id for id in others if id not in self._texts]:
            self._texts |= {got.id: decode_response(self._policy, got.tokens) for got in self._queue.get(unknown)}
        return [self._texts[id] for id in others]
