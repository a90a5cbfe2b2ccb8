"""The controller's process. What takes longest is begun first: agents and queue server, before its own imports.

The one place besides `submit` and the executor's entry point where the control plane meets the resource edge.
"""

import asyncio
import os
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pipeline.begin import Cluster, begin
from pipeline.compose import Tree, read_tree
from pipeline.disk import explain_full, is_full_error
from pipeline.processes import STOPPING, say
from pipeline.run_folder import RunFolder

_FAILED = 1


def run_controller(path: str) -> int:
    """What would stop it meanwhile is kept until it can be obeyed."""
    early: list[int] = []
    for sig in STOPPING:
        signal.signal(sig, lambda number, _: early.append(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    run = RunFolder(Path(path))
    lock = run.hold()
    tempfile.tempdir = str(run.cache)  # what libraries such as MLflow leave there when this is killed harms nobody
    try:
        return asyncio.run(_control(run, early))
    except OSError as error:
        if not is_full_error(error):
            raise
        say(explain_full(run.path, str(error)) or str(error))
        return _FAILED
    finally:
        os.close(lock)


def control_job(path: str) -> int:
    """The controller of a run in its Slurm job: what submitit pickles, and calls in each life of the job."""
    log = Path(path) / "logs" / "controller.log"
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    return run_controller(path)


def _cluster(run: RunFolder, tree: Tree) -> Cluster:
    if tree["cluster"]["kind"] == "slurm":
        from slurm.job import JobCluster

        size = tree["cluster"]
        return JobCluster.here(run, size["slurm"]["max_requeues"], size["min_nodes"] or size["nodes"])
    from slurm.local import LocalCluster

    return LocalCluster(run)


async def _control(run: RunFolder, early: Sequence[int]) -> int:
    tree = read_tree(run.config)
    cluster = _cluster(run, tree)
    begun = begin(run, run.begin_attempt(), cluster, tree["limits"]["restarts"])

    from pipeline.config import load_resolved
    from pipeline.controller import Controller
    from slurm.executor import ElasticExecutor

    config = load_resolved(run.config)
    return await Controller(run, config, cluster, ElasticExecutor, begun).main(early)
