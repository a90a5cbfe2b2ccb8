"""One Slurm job holds the nodes of a run for as long as it goes on: how it is asked for.

    batch script ─┬─ a loop per node: srun agent, and again when it has ended
                  ├─ with `launcher: step` slurm.launcher: srun for each worker
                  ├─ srun, one task on this node: the controller (a function pickled by submitit)
                  └─ at its end: slurm.again, unless the run is over

Nothing of the job runs srun but the batch script and its launcher: signals to a step reach all its processes, and an
srun client that is signalled ends what it started.
"""

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipeline.config import Config
from pipeline.core.errors import ConfigError
from pipeline.processes import SHIELD, python_command
from pipeline.run_folder import RunFolder, write_json
from slurm.commands import outside_of_jobs
from slurm.names import REPLACES, RESTARTS, agent_step, controller_step, left_marker, script_beat

_LOOPS = 50
"""So often a node's agent is started again by the script; the controller gives up earlier."""
_LEAVE_S = 10
_EXPANDED = re.compile(r"%\w|%%|\\")


@dataclass(frozen=True, slots=True)
class Predecessor:
    """The job whose place a new one takes, which was started so often; the new one is not to have its `lost` nodes."""

    job: str = ""
    restarts: int = 0
    lost: Sequence[str] = ()


def submit_job(run: RunFolder, config: Config, control: Callable[[str], int], after: Predecessor | None = None) -> str:
    """Submit the run's job; returns its id. `control(folder)` is called in each life of it, on its first node. Raises
    ConfigError with what sbatch said."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    executor = _executor(run, config, after or Predecessor())
    try:
        with _outside_of_jobs():
            job = executor.submit(control, str(run.path))
    except (FailedJobError, FailedSubmissionError) as error:
        raise ConfigError(f"Slurm refused the job: {error}") from None
    write_json(run.job, {"id": str(job.job_id)})
    return str(job.job_id)


@contextmanager
def _outside_of_jobs() -> Iterator[None]:
    """For as long as submitit calls sbatch: the variables of a job that this process is in would be options."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(outside_of_jobs(before))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def write_script(
    run: RunFolder, config: Config, control: Callable[[str], int], job: str, path: Path, after: Predecessor
) -> None:
    """What `submit_job` would give to sbatch, to be run inside job `job`."""
    from submitit.core.utils import DelayedSubmission, JobPaths

    run.jobs.mkdir(mode=0o700, exist_ok=True)
    DelayedSubmission(control, str(run.path)).dump(JobPaths(run.jobs, job_id=job).submitted_pickle)
    path.write_text(script(run, config, after))


def script(run: RunFolder, config: Config, after: Predecessor | None = None) -> str:
    """The text that `submit_job` gives to sbatch."""
    executor = _executor(run, config, after or Predecessor())
    text: str = executor._make_submission_file_text(executor._submitit_command_str, "dry-run")
    return text


def _executor(run: RunFolder, config: Config, after: Predecessor):  # type: ignore[no-untyped-def]
    from submitit.slurm.slurm import SlurmExecutor

    class JobExecutor(SlurmExecutor):  # type: ignore[misc]
        """Without the options that submitit gives where nothing was asked for."""

        def _make_submission_file_text(self, command: str, uid: str) -> str:
            unasked = ["#SBATCH --wckey=submitit", *([] if asked.time else ["#SBATCH --time=5"])]
            lines = super()._make_submission_file_text(command, uid).split("\n")
            return "\n".join(line for line in lines if line not in unasked)

    asked, cluster = config.cluster.slurm, config.cluster
    if _EXPANDED.search(str(run.path)):
        raise ConfigError(
            f"{run.path}: Slurm would read the % or \\ in this path as a pattern; choose another --run-dir"
        )
    try:
        executor = JobExecutor(run.jobs, python=_inside(asked.container, shlex.quote(sys.executable)))
    except RuntimeError:
        raise ConfigError("cluster.kind is slurm, but there is no Slurm here (no srun on the PATH)") from None
    names = ("partition", "account", "qos", "time", "constraint")
    options = {name: value for name in names if (value := getattr(asked, name))}
    if excluded := ",".join(filter(None, (asked.exclude, *after.lost))):
        options["exclude"] = excluded
    if asked.gres:
        options["gres"] = f"{asked.gres}:{cluster.slots_per_node}"
    least, most = cluster.min_nodes or cluster.nodes, cluster.nodes
    executor.update_parameters(
        job_name=_job_name(run),
        signal_delay_s=asked.signal_s,
        stderr_to_stdout=True,
        setup=[*asked.setup, *background(run, config, after)],
        teardown=_start_again(run, config),
        srun_args=[
            *("--nodes=1", "--ntasks=1", "--relative=0", "--overlap", "--no-kill", "--kill-on-bad-exit=0"),
            *("--cpu-bind=none", "--mem=0", f"--job-name={controller_step(run)}", *_gres(config)),
        ],
        additional_parameters={
            **{name: value or True for name, value in asked.extra.items()},
            **options,
            "nodes": str(most) if least == most else f"{least}-{most}",
            "cpus-per-task": str(asked.cpus_per_slot * cluster.slots_per_node),
            "mem": asked.mem,
            "no-kill": True,
            "requeue": True,
        },
    )
    return executor


def _job_name(run: RunFolder) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in run.name)


def _inside(container: str, command: str) -> str:
    return f"{container} {command}".strip()


def _gres(config: Config) -> list[str]:
    """No devices for what shares its node with workers that are steps of their own."""
    return ["--gres=none"] if config.by_steps and config.cluster.slurm.gres else []


def background(run: RunFolder, config: Config, after: Predecessor) -> list[str]:
    """What the script has going on beside the controller: a loop for each node, whose agent is started again unless it
    left for good, and one for the launcher of steps.

    srun has a child that ends the step when srun is killed. It is killed first: agents outlive their job's batch host,
    or none would be left to see that the job starts again. TERM, as a host that is shut down sends it to all processes,
    does not end the script: it still has that to see to.
    """
    asked, ended = config.cluster.slurm, shlex.quote(str(run.ended))
    gres = f"--gres={asked.gres}:{config.cluster.slots_per_node}" if asked.gres else ""
    gres = " ".join(_gres(config)) or gres
    log = shlex.quote(str(run.path / "logs" / "slurm-agent-"))
    srun = (
        f"srun --job-name={agent_step(run)} --overlap -N1 -n1 -w $n {gres} --mem=0 --cpu-bind=none --no-kill "
        f"--open-mode=append --output={log}$n.log"
    )
    agent = shlex.join([*SHIELD, *python_command("slurm.agent", str(run.path))])
    slots, left = config.cluster.slots_per_node, shlex.quote(str(left_marker(run, "", "")).removesuffix("-"))
    return [
        'set +eu; set +o pipefail; trap "" TERM',  # whatever the lines before have set
        f"mkdir -p -m 700 {shlex.quote(str(run.path / 'logs'))}",
        f"export {RESTARTS}=$((${{SLURM_RESTART_COUNT:-0}} + {after.restarts})) {REPLACES}={after.job}",
        f"life=$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}; beat={shlex.quote(str(script_beat(run, '')))}$life",
        f'( while [ ! -e {ended} ]; do touch "$beat"; sleep 1; done ) &',
        f'for n in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do ( k=0; while [ ! -e {ended} ] && '
        f"[ $k -lt {_LOOPS} ]; do {srun} {_inside(asked.container, agent)} --node $n --slots {slots} "
        "--job $life </dev/null & s=$!; until pkill -KILL -P $s || ! kill -0 $s 2>/dev/null; do sleep 1; done; "
        f"wait $s; [ -e {left}$life-$n ] && break; k=$((k+1)); sleep 1; done ) & done",
        *(_start_launcher(run, config) if config.by_steps else []),
    ]


def _start_launcher(run: RunFolder, config: Config) -> list[str]:
    """Another one when it has ended, unless it left for good."""
    command = shlex.join([*SHIELD, *python_command("slurm.launcher", str(run.path))])
    log = shlex.quote(str(run.path / "logs" / "slurm-launcher.log"))
    return [
        f"( k=0; while [ ! -e {shlex.quote(str(run.ended))} ] && [ $k -lt {_LOOPS} ]; do "
        f"{_inside(config.cluster.slurm.container, command)} --job $life </dev/null >>{log} 2>&1 && break; "
        "k=$((k+1)); sleep 1; done ) &"
    ]


def _start_again(run: RunFolder, config: Config) -> list[str]:
    """The script's last lines: the controller is gone. Where an agent has the job start again the script waits for its
    end; else it leaves at once, for while it lives the nodes are not given back (Slurm's TERM does not end it). At the
    end of the run agents are given time to leave."""
    again = shlex.join([*SHIELD, *python_command("slurm.again", str(run.path))])
    command = f"{_inside(config.cluster.slurm.container, again)} --job $life"
    return [
        f"[ -e {shlex.quote(str(run.ended))} ] || {{ {command} && sleep 60; exit; }}",
        f'for k in $(seq {_LEAVE_S * 5}); do [ -n "$(jobs -r)" ] || break; sleep .2; done',
    ]
