"""A job whose controller is gone starts again. Its script sees to that, if it lives; else one of its agents, which
stand by until the job is over.

    python -m slurm.again RUN_FOLDER --job ID.RESTARTS        the last line of the script

Where all its nodes live the job is requeued. Where one does not, a new job takes its place: Slurm has a requeued job
wait until each node that it had has answered or was given up (SlurmdTimeout: 300 s on most sites), holds it if it comes
back to a batch host that had crashed, and may (22.05) forget the GPUs of the others.
"""

import argparse
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pipeline.compose import read_tree
from pipeline.core.errors import ConfigError, SlurmError
from pipeline.pickles import load_own
from pipeline.run_folder import RunFolder, read_json, write_json
from slurm.allocation import Predecessor, submit_job
from slurm.commands import Clients
from slurm.names import RESTARTS, again_marker, num_charged, script_beat

_ALIVE_S = 3.0
"""A controller that lives has written its status within this time."""
_SCRIPT_ALIVE_S = 5.0
_SCRIPT_GONE_S = 15.0
_PERIOD_S = 1.0
_OUTAGE_S = 5.0
"""Between two tries while Slurm's controller does not answer."""
_SCRIPT = "script"
_HELD = "it starts again by the process that holds the allocation"


def stand_by(run: RunFolder, life: str, *, is_alone: bool, is_termed: bool, clients: Clients | None = None) -> str:
    """What is left for an agent to do whose controller has left in order, or (`is_alone`) is silent, maybe since TERM
    came (`is_termed`). Returns when that is done, or not needed, and says what it was."""
    clients = clients or Clients()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    while not run.ended.exists():
        if is_alone and (silent_s := age_s(run, run.status)) < _ALIVE_S:
            return f"the controller lives, it wrote its status {silent_s:.1f} s ago: it has given up this agent"
        script_s = age_s(run, script_beat(run, life))
        if is_termed and script_s < _SCRIPT_ALIVE_S:
            return "Slurm ends this life of the job, whose script lives"
        if is_termed or is_alone or script_s > _SCRIPT_GONE_S:
            try:
                if said := start_again(run, life, f"agent-{os.getpid()}", is_termed, clients):
                    return said
                is_alone = False  # another one does it
            except SlurmError as error:
                if is_termed or not error.is_outage:
                    return f"the job could not be started again: {error}"
        is_termed = signal.sigtimedwait({signal.SIGTERM}, _PERIOD_S) is not None or is_termed
    return "the run is over"


def start_again(run: RunFolder, life: str, who: str, is_ending: bool, clients: Clients) -> str:
    """Says what was done, "" if it is another one's to do. `is_ending`: Slurm ends this life of the job already.

    Raises SlurmError; after an outage it may be called again.
    """
    job = life.partition(".")[0]
    told = read_json(run.job) or {}
    if told.get("in_allocation"):
        return _HELD
    if told.get("id", job) != job:
        return f"job {told['id']} has the run now"
    if not _is_first(run, life, who):
        return ""
    restarts, config = int(os.environ.get(RESTARTS, "0")), read_tree(run.config)
    most = config["cluster"]["slurm"]["max_requeues"]
    if (charged := num_charged(run, restarts)) >= most:
        return give_up(run, f"its controller is gone, and its job was started again {charged} times")
    found = (clients.jobs_in_full() if is_ending else clients.jobs()).get(job)
    if found is None or found.is_ended or (is_ending and found.state != "PENDING") or found.state == "COMPLETING":
        return f"Slurm ends job {job}: {found.state if found else 'it knows it no more'}"
    lost = _lost_nodes(run, found.nodes, clients)
    if age_s(run, script_beat(run, life)) > _SCRIPT_ALIVE_S:
        lost |= {found.batch_host} - {""}
    if not lost and not is_ending:
        clients.requeue(job)
        return f"job {job} is requeued"
    try:
        return _replace(run, job, restarts + 1, sorted(lost), clients)
    except ConfigError as error:
        if is_ending:
            return f"Slurm has it start again, for it takes no other in its place: {error}"
        clients.requeue(job)
        return f"job {job} is requeued, for Slurm takes no other in its place: {error}"


def give_up(run: RunFolder, reason: str) -> str:
    """It was started again as often as may be: the run is over."""
    reason = f"{reason} (cluster.slurm.max_requeues)"
    write_json(run.ended, {"status": "failed", "attempt": max(run.attempts(), default=0), "reason": reason})
    return reason


def age_s(run: RunFolder, path: Path) -> float:
    """Since when the file was not written any more, by the clock of the file system's own host; for ever, if there is
    none."""
    now = run.secrets / f"now-{os.getpid()}-{time.monotonic_ns()}"
    try:
        now.touch(0o600, exist_ok=False)
        return now.stat().st_mtime - path.stat().st_mtime
    except FileNotFoundError:
        return math.inf
    except OSError:  # nothing can be written now
        return time.time() - path.stat().st_mtime if path.exists() else math.inf
    finally:
        now.unlink(missing_ok=True)


def _is_first(run: RunFolder, life: str, who: str) -> bool:
    """One process alone starts the job again after this life of it; a second one where that was the script, and it is
    gone."""
    marker = again_marker(run, life)
    if _made(marker, who):
        return True
    try:
        first = marker.read_text()
    except OSError:
        return False
    if first == _SCRIPT and age_s(run, script_beat(run, life)) > _SCRIPT_GONE_S:
        return _made(marker.with_name(f"{marker.name}-2"), who)
    return first == who


def _made(marker: Path, who: str) -> bool:
    try:
        with open(os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(who)
    except FileExistsError:
        return False
    return True


def _lost_nodes(run: RunFolder, nodes: Sequence[str], clients: Clients) -> set[str]:
    """Those of the job's that Slurm does not reach, or that its controller had no agent of."""
    seen = clients.nodes()
    told = (read_json(run.status) or {}).get("nodes", {})
    silent = {node for node in nodes if node in seen and not seen[node].is_usable}
    return silent | {node for node in nodes if told.get(node, "ready") not in ("ready", "joining")}


def _replace(run: RunFolder, job: str, restarts: int, lost: Sequence[str], clients: Clients) -> str:
    """Raises ConfigError with what sbatch said."""
    from pipeline.config import load_resolved

    config = load_resolved(run.config)
    control = load_own(run.jobs / f"{job}_submitted.pkl").function
    try:
        new = submit_job(run, config, control, Predecessor(job, restarts, lost))
    except ConfigError:
        if not lost:
            raise
        new = submit_job(run, config, control, Predecessor(job, restarts))  # without them there are too few
    if run.ended.exists():
        clients.cancel(new)
        return "the run is over"
    clients.cancel(job)
    return f"job {new} takes the place of job {job}, which had lost {', '.join(lost) or 'no node'}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="slurm.again")
    parser.add_argument("run", type=Path)
    parser.add_argument("--job", required=True)
    args = parser.parse_args(argv)
    run, clients = RunFolder(args.run), Clients()
    while not run.ended.exists():
        try:
            said = start_again(run, args.job, _SCRIPT, False, clients)
        except SlurmError as error:
            if not error.is_outage:
                raise SystemExit(f"the job could not be started again: {error}") from None
            print(error, flush=True)
            time.sleep(_OUTAGE_S)
        else:
            print(said or "one of its agents has the job start again", flush=True)
            sys.exit(bool(said))  # 0: the script is to wait


if __name__ == "__main__":
    main()
