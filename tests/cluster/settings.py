"""The configuration of the test cluster: one host plays all nodes, nothing outside its folder is read or written."""

import os
import pwd
import random
import socket
import time
from dataclasses import dataclass
from pathlib import Path

_LONGEST_FOLDER = 70
"""Sockets are made in there (spool/NODE/NODE_JOB.STEP, 30 bytes), and a socket's path has 107 bytes."""
_PORTS = range(20000, 32000)
"""Below those that the kernel gives to connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Times in seconds. A site's own are often `slurmd_timeout_s` 300 and `cred_expire_s` 120.

    A node that is silent for `slurmd_timeout_s` is DOWN. A requeued job may start `cred_expire_s` + 1 later. Jobs of
    the partition `low` are requeued for those of `main`: they get SIGTERM (and with `user_signal` the signal they
    asked for), and `grace_s` + `kill_wait_s` later SIGKILL. `own_memory`: each node has its own /dev/shm, which the
    processes of no other node can see.
    """

    nodes: int = 4
    gpus: int = 4
    cpus: int = 16
    mem_mb: int = 16000
    user_signal: bool = True
    grace_s: int = 10
    kill_wait_s: int = 5
    slurmd_timeout_s: int = 15
    cred_expire_s: int = 5
    own_memory: bool = False

    @property
    def names(self) -> list[str]:
        return [f"n{index + 1}" for index in range(self.nodes)]


def write(folder: Path, settings: Settings) -> Path:
    """Make the folder and put the configuration there; the path of slurm.conf. ValueError for an unfit folder."""
    if len(os.fsencode(folder)) > _LONGEST_FOLDER:
        raise ValueError(f"{folder} has more than {_LONGEST_FOLDER} bytes: the sockets in it could not be made")
    if set(str(folder)) & set(" \t#,%[]"):
        raise ValueError(f"{folder} has characters that mean something in slurm.conf")
    for name in ("log", "state", "dev", *(f"spool/{node}" for node in settings.names)):
        (folder / name).mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    for index in range(settings.gpus):
        gpu = folder / f"dev/gpu{index}"  # only with a device file per GPU does Slurm say which ones a step has
        if not gpu.is_symlink():
            gpu.symlink_to(os.devnull)
    (folder / "gres.conf").write_text(_gres(folder, settings))
    conf = folder / "slurm.conf"
    conf.write_text(_conf(folder, settings, free_ports(settings.nodes + 1)))
    return conf


def free_ports(count: int) -> list[int]:
    """Consecutive ports of 127.0.0.1 that nobody listens on."""
    for _ in range(100):
        first = random.choice(_PORTS)
        ports = list(range(first, first + count))
        if all(_is_free(port) for port in ports):
            return ports
    raise OSError(f"no {count} consecutive free ports in {_PORTS}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Slurm does
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def first_job_id() -> int:
    """Larger in each later cluster: submitit's folders carry job ids, so an id may never come back.

    Four ids a second, which is more than anybody submits; Slurm's largest is 67 043 327.
    """
    return int(time.time() * 4) % 60_000_000 + 1


def _gres(folder: Path, settings: Settings) -> str:
    files = f"{folder}/dev/gpu[0-{settings.gpus - 1}]" if settings.gpus > 1 else f"{folder}/dev/gpu0"
    lines = [f"NodeName={node} Name=gpu Type=fake File={files}" for node in settings.names if settings.gpus]
    return "\n".join(["AutoDetect=off", *lines, ""])


def _conf(folder: Path, settings: Settings, ports: list[int]) -> str:
    host = socket.gethostname().split(".")[0]
    user = pwd.getpwuid(os.getuid()).pw_name
    gres = f"Gres=gpu:fake:{settings.gpus}" if settings.gpus else ""
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={settings.cpus} Boards=1"
        f" SocketsPerBoard=1 CoresPerSocket={settings.cpus} ThreadsPerCore=1 RealMemory={settings.mem_mb} {gres}"
        for node, port in zip(settings.names, ports[1:], strict=True)
    )
    # Slurm 22.05's place and name for it; a newer PreemptParameters would be fatal there.
    user_signal = "SlurmctldParameters=preempt_send_user_signal" if settings.user_signal else ""
    low = f"PriorityTier=1 PreemptMode=REQUEUE GraceTime={settings.grace_s}"
    return f"""\
ClusterName=pivottest
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire={settings.cred_expire_s}
CredType=cred/munge
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/log/slurmctld.log
StateSaveLocation={folder}/state
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/log/slurmd.%n.log
SlurmdSpoolDir={folder}/spool/%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
GresTypes=gpu
DefMemPerCPU=64
FirstJobId={first_job_id()}
MinJobAge=3600
ReturnToService=1
JobRequeue=1
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,sched_min_interval=0
SlurmdTimeout={settings.slurmd_timeout_s}
SlurmctldTimeout=30
MessageTimeout=10
BatchStartTimeout=5
KillWait={settings.kill_wait_s}
InactiveLimit=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{user_signal}
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=10
PartitionName=low Nodes=ALL Default=NO MaxTime=INFINITE State=UP {low}
"""
