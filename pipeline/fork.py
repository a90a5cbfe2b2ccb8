"""Back to an earlier version of a run: as a new run beside it, from which nothing is taken away.

A version N that is still within reach is made again from the newest kept checkpoint <= N and the recorded batches
behind it, by the code that resumes any run.
"""

from typing import NamedTuple

from pipeline.checkpoint import Checkpoint, store_of
from pipeline.config import Config, save_resolved
from pipeline.core.errors import ConfigError
from pipeline.queue.fork import Recorded, fork_queue
from pipeline.run_folder import RunFolder, read_json, write_json
from pipeline.tracking import MetricsLog


class Return(NamedTuple):
    """How version `step` is reached again: from the checkpoint at `path` ("": the base model) of version `base`."""

    step: int
    base: int
    path: str


def plan_return(run: RunFolder, config: Config, recorded: Recorded, step: int) -> Return | None:
    """None: `step` is the newest version, so the run itself goes on from there. Raises ConfigError, with what is
    valid, for a version that was never there or is out of reach."""
    store = store_of(run, config)
    complete = store.complete()
    oldest, newest = min(complete, default=0), max([recorded.finished, *complete])
    if step == newest:
        return None
    if step > newest or 0 < step < oldest:
        valid = f"0 (the base model) and {oldest} to {newest}" if oldest else f"0 (the base model) to {newest}"
        raise ConfigError(
            f"{run.name} cannot go back to step {step}: valid are {valid}; checkpoints are kept of steps "
            f"{', '.join(map(str, complete)) or 'none'} (checkpoint.keep)"
        )
    base = max((kept for kept in complete if kept <= step), default=0)
    return Return(step, base, store.path(base) if base else "")


def make_fork(run: RunFolder, before: Config, config: Config, back: Return) -> RunFolder:
    """A new run that holds `run` as it was after version `back.step`: `RUN-fromN` beside it. `run` may not be live;
    `before` is its configuration, `config` the fork's but for its name and the place of its checkpoints.

    It is a run once its config.yaml is there, which is written last. Raises ConfigError if its checkpoints' place
    holds others.
    """
    fork = _claim(run, back.step)
    fork.create()
    uri = config.checkpoint.uri
    if uri and uri == before.checkpoint.uri:
        uri = uri.rstrip("/") + fork.name.removeprefix(run.name)
    config = config.model_copy(
        update={
            "run": config.run.model_copy(update={"name": fork.name}),
            "checkpoint": config.checkpoint.model_copy(update={"uri": uri}),
        }
    )
    store = store_of(fork, config)
    store.require_unused()
    if back.base:
        checkpoint = Checkpoint(back.path)
        store.save(back.base, ((name, checkpoint.read(name)) for name in checkpoint.files))
    fork_queue(run.queue, fork.queue, back.step)
    MetricsLog(fork.metrics).rewrite(row for row in MetricsLog(run.metrics).rows() if row[0] <= back.step)
    if (inputs := read_json(run.inputs)) is not None:
        write_json(fork.inputs, inputs)
    mlflow_run = read_json(run.mlflow_run) or {}
    origin = {"run": str(run.path), "name": run.name, "step": back.step, "mlflow_run_id": mlflow_run.get("run_id")}
    write_json(fork.origin, origin)
    save_resolved(config, fork.config)
    return fork


def _claim(run: RunFolder, step: int) -> RunFolder:
    """The first free name: `RUN-fromN`, `RUN-fromN-2`, ..."""
    number = 1
    while True:
        name = f"{run.name}-from{step}" + (f"-{number}" if number > 1 else "")
        path = run.path.parent / name
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            number += 1
        except OSError as error:
            raise ConfigError(f"the fork's folder cannot be made: {error}") from None
        else:
            return RunFolder(path)
