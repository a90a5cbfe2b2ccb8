"""A reward function of the user's as a source of scores."""

from pipeline.config import Config
from pipeline.core.errors import StageFailed
from stages.genrm.verdict import Failure, FailureType, Score
from stages.own.host import Fault, OwnFunction, pool_of
from stages.scoring.asking import Asking
from stages.scoring.base import Answer, Give, Question

_TYPES = {
    "error": FailureType.ERROR,
    "invalid": FailureType.UNPARSED,
    "memory": FailureType.MEMORY,
    "timeout": FailureType.TIMEOUT,
    "crashed": FailureType.CRASHED,
}


class FunctionSource(Asking):
    """A Source. Nothing is asked again: what a function says of the same response does not change."""

    retries = 0
    needs_example = True
    version = 0

    def __init__(self, name: str, config: Config, give: Give) -> None:
        super().__init__(give)
        self.name = name
        self._spec = config.reward.functions[name]
        self._is_strict = config.is_strict
        self._pool = pool_of(
            OwnFunction(
                where=f"reward.functions.{name}",
                path=self._spec.path,
                kind="score",
                code_path=tuple(config.run.code_path),
                memory_bytes=self._spec.memory_bytes,
                processes=self._spec.processes,
                concurrency=self._spec.concurrency,
            )
        )

    async def answer(self, question: Question) -> Answer:
        example = question.example
        assert example is not None
        arguments = {
            "data_source": example.data_source,
            "solution_str": question.response,
            "ground_truth": example.ground_truth,
            "extra_info": example.extra_info,
            **self._spec.options,
        }
        found = await self._pool.call(question.id, arguments, self._spec.timeout_s)
        if not isinstance(found, Fault):
            return Answer(id=question.id, outcome=Score(found.score), figures=found.figures)
        if self._is_strict and found.kind == "timeout":
            raise StageFailed(
                f"reward.functions.{self.name} took longer than its timeout_s ({self._spec.timeout_s:g} s) on "
                f"{question.row.id}: in a strict run no result may depend on time, so raise the limit"
            )
        return Answer(id=question.id, outcome=Failure(_TYPES[found.kind]), text=found.text)
