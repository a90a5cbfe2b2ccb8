"""A real Slurm on this machine: munge, slurmctld and a slurmd for each virtual node, up in seconds, and its faults.

No systemd, no accounting, nothing outside the folder given, no process that outlives `down` (nor this process). All
nodes share hostname, ports and /tmp, and without `own_memory` also /dev/shm: what tells them apart is SLURMD_NODENAME.

    with SlurmCluster(folder, nodes=2, gpus=4) as cluster:
        cluster.client("sbatch", "--wrap", "hostname")       # or any process with cluster.env in its environment
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from tests.cluster.machine import Machine, is_alive, signal_all
from tests.cluster.packages import PATH, program
from tests.cluster.settings import Settings, write

T = TypeVar("T")

READY = {"idle", "mixed", "allocated"}
_CLIENT_S = 20
_UP_S = 30
_PERIOD_S = 0.05
_OF_JOBS = ("SLURM_", "SBATCH_", "SALLOC_", "SRUN_", "SQUEUE_", "SINFO_", "SCANCEL_")


class ClusterError(RuntimeError):
    """A client failed, or the cluster did not do what was waited for."""


class SlurmCluster:
    """`settings` are the fields of `Settings`. Up between `up` and `down`, or inside a `with`.

    `env` is what a process needs in its environment to use the cluster. A `down` is a power cut: end first what must
    end in order. In a folder that was used before, the queue of then is still there. Raises ClusterError with the tails
    of the logs where something does not come up.
    """

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder.resolve()
        self.settings = Settings(**settings)
        self.nodes = self.settings.names
        self.conf = self.folder / "slurm.conf"
        self.env = {"SLURM_CONF": str(self.conf)}
        self._machines: dict[str, Machine] = {}
        self._daemons: dict[str, int] = {}

    # --- up and down ------------------------------------------------------------------------------------------------

    def up(self) -> None:
        write(self.folder, self.settings)
        try:
            self._start_munge()
            self._start("slurmctld", "controller")
            for node in self.nodes:
                self._start_slurmd(node)
            self.wait_until(lambda: self._dead() or set(self.node_states().values()) <= READY, "all nodes serve", _UP_S)
            if dead := self._dead():
                raise ClusterError(f"dead at once: the daemons of {', '.join(dead)}\n{self.log_tails()}")
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """Kill everything. Idempotent."""
        machines, self._machines, self._daemons = self._machines, {}, {}
        for machine in machines.values():
            machine.close()

    def __enter__(self) -> "SlurmCluster":
        self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    # --- clients ----------------------------------------------------------------------------------------------------

    @property
    def client_env(self) -> dict[str, str]:
        """This process's environment outside of any job, with the cluster."""
        return {name: value for name, value in os.environ.items() if not name.startswith(_OF_JOBS)} | self.env

    def client(self, name: str, *args: str, timeout_s: float = _CLIENT_S) -> str:
        """What a client of Slurm says. ClusterError if it fails or takes too long."""
        command = [str(program(name)), *args]
        try:
            done = subprocess.run(
                command,
                env=self.client_env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ClusterError(f"{command} took more than {timeout_s} s") from None
        if done.returncode != 0:
            raise ClusterError(f"{command} ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def submit(self, *args: str) -> str:
        """The id of the job that `sbatch ARGS` makes. Its output goes nowhere unless the arguments say where."""
        return self.client("sbatch", "--parsable", "--output=/dev/null", *args).strip()

    def jobs(self) -> dict[str, str]:
        """State of each job, also of those that ended."""
        lines = self.client("squeue", "-h", "-a", "-r", "-t", "all", "-o", "%i %T").splitlines()
        return dict(line.split() for line in lines)

    def jobs_in(self, state: str) -> list[str]:
        return [job for job, found in self.jobs().items() if found == state]

    def node_states(self) -> dict[str, str]:
        """State of each node, without the flags that Slurm appends to it ("*": it does not answer)."""
        lines = self.client("sinfo", "-h", "-N", "-p", "main", "-o", "%N %T").splitlines()
        return {name: state.rstrip("*~#!%$@^-+") for name, state in map(str.split, lines)}

    def wait_until(self, condition: Callable[[], T], what: str, timeout_s: float = 30) -> T:
        """Wait until the condition returns something true, and return that. A ClusterError in it counts as false."""
        deadline = time.monotonic() + timeout_s
        last: object = None
        while time.monotonic() < deadline:
            try:
                if value := condition():
                    return value
                last = value
            except ClusterError as error:
                last = error
            time.sleep(_PERIOD_S)
        raise ClusterError(f"not within {timeout_s} s: {what} (last: {last})\n{self.log_tails()}")

    def log_tails(self, lines: int = 8) -> str:
        tails = []
        for path in sorted((self.folder / "log").glob("*.log")):
            tails += [f"--- {path.name}", *path.read_text(errors="replace").splitlines()[-lines:]]
        return "\n".join(tails)

    # --- faults -----------------------------------------------------------------------------------------------------

    def processes(self, node: str | None = None) -> list[int]:
        """All processes of a virtual node: slurmd, its step daemons, their tasks, and whatever these left behind.

        Without a node: those of the whole cluster.
        """
        machines = [self._machines[node]] if node else self._machines.values()
        return [pid for machine in machines for pid in machine.processes()]

    def memory(self, node: str) -> Path:
        """The node's /dev/shm: the host's, unless each has its own."""
        return self._machines[node].memory

    def slurmd(self, node: str) -> int | None:
        """Its pid, if it lives."""
        return self._living(node)

    def kill_slurmd(self, node: str) -> None:
        """Its steps go on."""
        self._kill(node)

    def crash(self, node: str, forgets_steps: bool = False) -> int:
        """A power cut: all processes of the node end at one instant, and its own memory is empty. How many they were.

        With `forgets_steps` the sockets of its steps are lost too, but not the script of its job. Then, if this was
        a batch host and returns, Slurm cannot start the job there again ("launch failed requeued held"). Where the
        sockets are left, slurmd removes the script and the job starts. Slurm notices the return only of a job that
        ran for 15 s before; a younger one stays RUNNING without a script.
        """
        count = self._machines[node].crash()
        if self.settings.own_memory:
            for path in self.memory(node).iterdir():
                path.unlink()
        if forgets_steps:
            for socket in (self.folder / "spool" / node).glob(f"{node}_*"):
                socket.unlink()
        return count

    def half_crash(self, node: str, pause_s: float = 0.02) -> int:
        """A bad shutdown: the node's processes are killed one by one, and the others see it. How many they were."""
        return self._machines[node].kill_one_by_one(pause_s)

    def restart(self, node: str, wait: bool = True) -> None:
        """Start slurmd again, and wait until the node serves."""
        if self._living(node) is None:
            self._start_slurmd(node)
        if wait:
            self.wait_until(lambda: self.node_states()[node] in READY, f"{node} serves again")

    def set_down(self, node: str) -> None:
        """Slurm treats it at once as a dead node; its processes are told to end, as far as they belong to a job."""
        self.client("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")

    def drain(self, node: str) -> None:
        """It gets no more jobs; those on it go on."""
        self.client("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test")

    def set_up(self, node: str) -> None:
        self.client("scontrol", "update", f"NodeName={node}", "State=RESUME")
        self.wait_until(lambda: self.node_states()[node] in READY, f"{node} serves again")

    def kill_controller(self, saved: bool = True) -> None:
        """Kill slurmctld, when it has written to its disk what it knows: it does so each 5 s only.

        What it did not save it has forgotten when it is back: a job that just started is then PENDING again, its steps
        are ended. That is with `saved=False`.
        """
        if saved:
            self._have_state_saved()
        self._kill("controller")

    def _have_state_saved(self) -> None:
        parts = self.folder / "state/part_state"  # written after the jobs' state, and only if it was changed
        before = parts.stat().st_mtime_ns if parts.exists() else 0
        self.client("scontrol", "update", "PartitionName=main", "State=UP")
        self.wait_until(lambda: parts.exists() and parts.stat().st_mtime_ns > before, "slurmctld saves its state")

    def save_state(self, folder: Path) -> None:
        """A copy of what slurmctld knows now."""
        self._have_state_saved()
        shutil.copytree(self.folder / "state", folder)

    def restore_state(self, folder: Path) -> None:
        """A slurmctld that is started next knows what it knew then, and nothing since."""
        shutil.copytree(folder, self.folder / "state", dirs_exist_ok=True)

    def start_controller(self) -> None:
        """slurmctld, from its saved state; waits until it answers."""
        if self._living("controller") is None:
            self._start("slurmctld", "controller")
        self.wait_until(lambda: self.client("scontrol", "ping"), "slurmctld answers")

    def reset(self) -> None:
        """Make it as after `up`: daemons live, nodes are idle, no job is left."""
        self.start_controller()
        self.client("scancel", "--full", f"--user={os.getuid()}")
        for node in self.nodes:
            self.restart(node, wait=False)
        self.wait_until(self._is_idle, "no job and no dead node is left", _UP_S)

    def _is_idle(self) -> bool:
        for node, state in self.node_states().items():
            if state in ("down", "drained"):
                self.client("scontrol", "update", f"NodeName={node}", "State=RESUME")
        return set(self.node_states().values()) == {"idle"}

    # --- parts ------------------------------------------------------------------------------------------------------

    def _start_munge(self) -> None:
        files = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munged.pid", "seed-file": "munge.seed"}
        options = [f"--{option}={self.folder / name}" for option, name in files.items()]
        self._start("munged", "munge", "--foreground", "--force", "--num-threads=4", *options)
        socket = f"--socket={self.folder / 'munge.sock'}"
        self.wait_until(lambda: self.client("munge", socket, "--no-input"), "munged answers", _UP_S)

    def _start_slurmd(self, node: str) -> None:
        self._start("slurmd", node, "-N", node)

    def _start(self, name: str, machine: str, *args: str) -> None:
        """Start a daemon in the foreground on a virtual machine (one of a node, or one of its own)."""
        path = program(name)
        if path is None:
            raise ClusterError(f"{name} is not installed")
        if machine not in self._machines:
            own_memory = self.settings.own_memory and machine in self.nodes
            self._machines[machine] = Machine({"PATH": PATH, **self.env}, own_memory)
        ours = ["-D", "-f", str(self.conf)] if name != "munged" else []
        log = self.folder / "log" / (f"{name}.{machine}.out" if ours else "munged.log")  # the others write logs too
        self._daemons[machine] = self._machines[machine].start([path, *ours, *args], log)

    def _living(self, machine: str) -> int | None:
        pid = self._daemons.get(machine)
        return pid if pid is not None and is_alive(pid) else None

    def _dead(self) -> list[str]:
        return [machine for machine in self._daemons if self._living(machine) is None]

    def _kill(self, machine: str) -> None:
        pid = self._living(machine)
        if pid is None:
            raise ClusterError(f"the daemon of {machine} is not running")
        signal_all([pid], signal.SIGKILL)
        self.wait_until(lambda: not is_alive(pid), f"the daemon of {machine} is dead")
