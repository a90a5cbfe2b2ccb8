"""A run in an allocation that its user holds (`salloc`): the script of its job, run by a process of the user's, and
again where a job would be requeued.

    python -m slurm.held RUN_FOLDER

It ends with the run, or with the allocation.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from pipeline.config import Config
from pipeline.core.errors import ConfigError, SlurmError
from pipeline.processes import python_command, python_environment
from pipeline.run_folder import RunFolder, read_json, write_json
from slurm.again import give_up
from slurm.allocation import Predecessor, write_script
from slurm.commands import Clients
from slurm.names import agent_step, controller_step, script_beat, user_prefix

_PAUSE_S = 1.0
_OUTAGE_S = 5.0
_SILENT_S = 3600.0
"""So long Slurm may be silent before its allocation is taken for over."""
_LEAVE_S = 60.0


def hold(run: RunFolder, config: Config, control: Callable[[str], int]) -> str:
    """Start the run in the allocation that this process is in; its id. `control`: as for `submit_job`. Raises
    ConfigError where there is no allocation, or one that does not fit."""
    job = _allocation(run, config)
    lives = [int(beat.suffix[1:]) for beat in run.secrets.glob(f"{script_beat(run, job).name}.*")]
    first = 1 + max(lives, default=-1)
    write_script(run, config, control, job, _script(run), Predecessor(restarts=-first))
    write_json(run.job, {"id": job, "in_allocation": True})
    log = run.path / "logs" / "script.log"
    log.parent.mkdir(mode=0o700, exist_ok=True)
    with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as output:
        subprocess.Popen(
            python_command("slurm.held", str(run.path), "--first", str(first)),
            env=python_environment() | {name: value for name, value in os.environ.items() if name.startswith("SLURM_")},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    return job


def _allocation(run: RunFolder, config: Config) -> str:
    """The id of this process's own, if it has the nodes and devices that the run asks for."""
    job, cluster = os.environ.get("SLURM_JOB_ID", ""), config.cluster
    if not job or "SLURM_STEP_ID" in os.environ:
        where = "a step of a job" if job else "no allocation"
        raise ConfigError(f"--in-allocation is for the shell of an allocation (salloc ...), and this is in {where}")
    try:
        found, running = Clients(tries=2).jobs().get(job), Clients(tries=2).steps(job).values()
    except SlurmError as error:
        raise ConfigError(f"Slurm does not say what allocation {job} has: {error}") from None
    if found is None or found.state != "RUNNING":
        raise ConfigError(f"allocation {job} is {found.state if found else 'not known to Slurm'} (any more)")
    if any(step.name.startswith(user_prefix()) for step in running):
        raise ConfigError(f"allocation {job} has a run already")
    least, most = cluster.min_nodes or cluster.nodes, cluster.nodes
    if not least <= len(found.nodes) <= most:
        raise ConfigError(
            f"allocation {job} has {len(found.nodes)} nodes, the run wants {least}..{most} (cluster.nodes)"
        )
    gres = f"{cluster.slurm.gres}:{cluster.slots_per_node}"
    asked = [f"--gres={gres}"] if cluster.slurm.gres else [f"--cpus-per-task={cluster.slots_per_node}"]
    probe = ["srun", "--overlap", f"-N{len(found.nodes)}", "--ntasks-per-node=1", "--immediate=10", "--mem=0"]
    said = subprocess.run(
        [*probe, *asked, "true"], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    if said.returncode != 0:
        raise ConfigError(
            f"allocation {job} cannot give {asked[0]} on each node (cluster.slots_per_node): {said.stderr.strip()}"
        )
    return job


def _script(run: RunFolder) -> Path:
    return run.jobs / "in_allocation.sh"


def steps(run: RunFolder, job: str, clients: Clients) -> dict[str, str]:
    """The names, by id, of those steps of the allocation that are the run's. Raises SlurmError."""
    ours = (agent_step(run), controller_step(run))
    return {step.id: step.name for step in clients.steps(job).values() if step.name in ours}


def _end_life(run: RunFolder, group: int, job: str, clients: Clients) -> None:
    """Nothing of it is left: the script's loops first, or they would start agents again, then the steps."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    deadline = time.monotonic() + _LEAVE_S
    asked = set[str]()
    while time.monotonic() < deadline:
        try:
            left = steps(run, job, clients)
        except SlurmError as error:
            if not error.is_outage:
                return  # the allocation is over
            time.sleep(_OUTAGE_S)
            continue
        if not left:
            return
        for step in set(left) - asked:
            clients.cancel(step)
        asked |= set(left)
        time.sleep(_PAUSE_S)


def _nodes(run: RunFolder, job: str, clients: Clients) -> tuple[str, ...]:
    """Those that the allocation has left; none if it is over. Asks until Slurm answers, as long as there is a run."""
    deadline = time.monotonic() + _SILENT_S
    while run.job.exists() and time.monotonic() < deadline:
        try:
            found = clients.jobs().get(job)
            return found.nodes if found is not None and found.state == "RUNNING" else ()
        except SlurmError as error:
            print(error, flush=True)
            time.sleep(_OUTAGE_S)
    return ()


def main(argv: list[str] | None = None) -> None:
    from pipeline.compose import read_tree

    parser = argparse.ArgumentParser(prog="slurm.held")
    parser.add_argument("run", type=Path)
    parser.add_argument("--first", type=int, required=True)
    args = parser.parse_args(argv)
    run, clients = RunFolder(args.run), Clients()
    job = str((read_json(run.job) or {})["id"])
    cluster = read_tree(run.config)["cluster"]
    most, least = cluster["slurm"]["max_requeues"], cluster["min_nodes"] or cluster["nodes"]
    for count in range(args.first, args.first + most + 1):
        nodes = _nodes(run, job, clients)
        if len(nodes) < least:
            print(f"allocation {job} has {len(nodes)} nodes left: the run waits for a `resume` elsewhere", flush=True)
            return
        environment = os.environ | {"SLURM_RESTART_COUNT": str(count), "SLURM_JOB_NODELIST": ",".join(nodes)}
        life = subprocess.Popen(["bash", _script(run)], env=environment, start_new_session=True)
        life.wait()
        _end_life(run, life.pid, job, clients)
        if run.ended.exists():
            return
        time.sleep(_PAUSE_S)
    print(give_up(run, f"its controller is gone, and it was started again {most} times"), flush=True)


if __name__ == "__main__":
    main()
