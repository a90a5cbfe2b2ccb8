"""What a rank does when the others are gone."""

import functools
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pipeline.stage import StageResult, StageSpec, TaskContext

if TYPE_CHECKING:
    from stages.worker import Worker


@contextmanager
def with_the_others(worker: "Worker", doing: str) -> Iterator[None]:
    """Where other ranks are gone, or do not answer in time, this one is of no use, and its error says nothing about
    the run. It waits to be killed, for as long as it may take until the first death is known, or ends as a worker: then
    all ranks are started anew. Any other exception is the caller's own."""
    try:
        yield
    except RuntimeError as error:
        if worker.config.trainer.ranks == 1 or not _is_of_the_group(error):
            raise
        said = "".join(traceback.format_exception(error))
        os.write(2, f"{said}rank {worker.rank} has lost the others in {doing}\n".encode())
        time.sleep(2 * worker.config.limits.heartbeat_s)
        os._exit(1)


def collective(stage: Callable[[TaskContext, StageSpec], StageResult]) -> Callable[..., StageResult]:
    """A stage in which all ranks take part."""

    @functools.wraps(stage)
    def run(task: TaskContext, spec: StageSpec) -> StageResult:
        with with_the_others(task.worker, spec.stage):
            return stage(task, spec)

    return run


def _is_of_the_group(error: RuntimeError) -> bool:
    from torch.distributed import DistError

    return isinstance(error, DistError) or "/gloo/" in str(error)  # gloo has no type of its own
