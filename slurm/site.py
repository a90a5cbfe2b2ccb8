"""What a user should know of a Slurm site before the first submission."""

import re
import shutil
from collections.abc import Iterator, Mapping

from pipeline.core.errors import SlurmError
from pipeline.doctor.finding import Finding, absent, ok, warning
from slurm.commands import Clients

_OLDEST = (22, 5)


def look_at_slurm(clients: Clients | None = None) -> Iterator[Finding]:
    if shutil.which("sinfo") is None or shutil.which("sbatch") is None:
        yield absent("Slurm", "no sinfo and sbatch: runs are local")
        return
    clients = clients or Clients(timeout_s=10.0, tries=1)
    try:
        config = settings_of(clients.config())
        partitions = clients.partitions()
    except SlurmError as error:
        said = f"does not answer: {str(error).splitlines()[0]}"
        yield warning("Slurm", said, "only local runs work here: try a login node; scontrol ping says who is up")
        return
    yield version(config.get("SLURM_VERSION", ""))
    yield (
        ok("Slurm partitions", ", ".join(partitions))
        if partitions
        else warning(
            "Slurm partitions", "none is open to you", "ask the site for an account (cluster.slurm.account, .partition)"
        )
    )
    yield tracking_of_processes(config.get("ProctrackType", ""), config.get("TaskPlugin", ""))
    yield requeue(config.get("JobRequeue", "1"))
    yield grace(config.get("KillWait", "30 sec"))


def settings_of(text: str) -> dict[str, str]:
    """`scontrol show config`."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def version(text: str) -> Finding:
    found = tuple(int(part) for part in re.findall(r"\d+", text)[:2])
    if found and found < _OLDEST:
        return warning("Slurm", text, "22.05 and newer are tried: `srun --overlap` and `--no-kill` must work")
    return ok("Slurm", text or "it does not say which")


def tracking_of_processes(proctrack: str, task: str) -> Finding:
    said = f"{proctrack or 'unknown'}, {task or 'no task plugin'}"
    if "cgroup" not in proctrack:
        return warning(
            "Slurm cgroups", said, "processes that outlive a job are not ended by Slurm; ours end themselves"
        )
    return ok("Slurm cgroups", said)


def requeue(value: str) -> Finding:
    if value == "0":
        return warning(
            "Slurm requeue", "jobs are not requeued by default", "ours ask for it (--requeue); some sites refuse it"
        )
    return ok("Slurm requeue", "allowed")


def grace(value: str) -> Finding:
    found = re.match(r"\d+", value)
    seconds = int(found[0]) if found else 30
    if seconds < 30:
        return warning(
            "Slurm KillWait", value, "a run has so long to save when its time is up: checkpoint.save_freq small"
        )
    return ok("Slurm KillWait", value)


def jobs_of(environment: Mapping[str, str]) -> Finding:
    job = environment.get("SLURM_JOB_ID")
    return ok("Slurm job", f"this shell is in job {job}") if job else absent("Slurm job", "this shell is in none")
