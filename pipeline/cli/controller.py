"""The controller's process. What takes longest is begun first: agents and queue server, before its own imports.

The one place besides `submit` and the executor's entry point where the control plane meets the resource edge.
"""

import asyncio
import os
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pipeline.begin import begin
from pipeline.compose import read_tree
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


async def _control(run: RunFolder, early: Sequence[int]) -> int:
    from slurm.local import LocalCluster

    cluster = LocalCluster(run)
    begun = begin(run, run.begin_attempt(), cluster, read_tree(run.config)["limits"]["restarts"])

    from pipeline.config import load_resolved
    from pipeline.controller import Controller
    from slurm.executor import ElasticExecutor

    config = load_resolved(run.config)
    return await Controller(run, config, cluster, ElasticExecutor, begun).main(early)
