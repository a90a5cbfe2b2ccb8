import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster import ClusterError, SlurmCluster, packages, require
from tests.cluster.machine import Machine, can_own_memory, is_alive
from tests.cluster.settings import Settings, free_ports, write

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).parents[2]

WITNESS = """
import os, sys, time
parent = os.getppid()
print("up", flush=True)
while os.getppid() == parent:
    time.sleep(.005)
print("my parent died", flush=True)
time.sleep(100)
"""
"""Says so when its parent dies before itself."""


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


# --- one virtual machine --------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> tuple[Machine, Path]:
    """A machine with a shell that detached, its child and an orphan, which says in the log when its parent dies."""
    machine, log = Machine({"PATH": os.defpath}), tmp_path / "log"
    (tmp_path / "witness.py").write_text(WITNESS)
    script = f"(setsid sh -c '{sys.executable} {tmp_path}/witness.py; :' &); sleep 100; :"
    machine.start(["/bin/sh", "-c", script], log)
    wait_for(lambda: "up" in text(log) and len(machine.processes()) == 4, "the tree is there")
    return machine, log


def test_a_crash_is_seen_by_nobody_on_the_machine(tree: tuple[Machine, Path]) -> None:
    machine, log = tree
    pids = machine.processes()
    assert machine.crash() == 4
    assert not any(map(is_alive, pids)) and machine.processes() == []
    assert text(log) == "up\n"
    machine.start(["/bin/echo", "again"], log)  # the machine itself is there
    wait_for(lambda: text(log).endswith("again\n"), "it runs again")
    machine.close()
    machine.close()


def test_a_bad_shutdown_is_seen_by_those_who_die_later(tree: tuple[Machine, Path]) -> None:
    machine, log = tree
    pids = machine.processes()
    assert machine.kill_one_by_one(pause_s=0.2) == 4
    assert not any(map(is_alive, pids))
    assert "my parent died" in text(log)
    machine.close()


def test_the_end_of_a_machine_is_the_end_of_what_runs_on_it(tree: tuple[Machine, Path]) -> None:
    machine, _ = tree
    pids = machine.processes()
    machine.close()
    assert not any(map(is_alive, pids))


def test_machines_with_their_own_memory_see_no_other(tmp_path: Path) -> None:
    if not can_own_memory():
        pytest.skip("NO RIGHT TO MOUNT HERE: nodes share one /dev/shm, and what keeps them apart there is not tested")
    machines = [Machine({"PATH": os.defpath}, own_memory=True) for _ in range(2)]
    for number, machine in enumerate(machines):
        machine.start(["/bin/sh", "-c", f": > /dev/shm/of-{number}; echo up; sleep 100; :"], tmp_path / f"log{number}")
    wait_for(lambda: all(text(tmp_path / f"log{number}") == "up\n" for number in range(2)), "both have written")
    assert [os.listdir(machine.memory) for machine in machines] == [["of-0"], ["of-1"]]
    assert not any(Path(f"/dev/shm/of-{number}").exists() for number in range(2))
    for machine in machines:
        machine.close()


def test_a_zombie_is_not_alive() -> None:
    process = subprocess.Popen(["sleep", "100"])
    assert is_alive(process.pid)
    process.kill()
    wait_for(lambda: not is_alive(process.pid), "it is seen to be dead, though nobody has waited for it")
    os.kill(process.pid, 0)
    process.wait()


# --- the cluster ----------------------------------------------------------------------------------------------------


def test_without_slurm_tests_are_skipped_with_a_loud_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "PATH", "/nowhere")
    monkeypatch.delenv("PIVOT_TEST_INSTALL", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"NO SLURM HERE.*slurmctld, slurmd, munged.*PIVOT_TEST_INSTALL=1"):
        require()


def test_a_folder_that_slurm_could_not_use_is_refused(tmp_path: Path) -> None:
    for name in ("a b", "x" * 80):
        with pytest.raises(ValueError, match="has "):
            write(tmp_path / name, Settings())
    assert len(set(free_ports(5))) == 5


@pytest.mark.parametrize("user_signal", [True, False])
def test_sites_differ_in_what_a_preempted_job_is_told(tmp_path: Path, user_signal: bool) -> None:
    conf = write(tmp_path / "c", Settings(user_signal=user_signal, grace_s=7)).read_text()
    assert ("preempt_send_user_signal" in conf) == user_signal
    assert "GraceTime=7" in conf


def test_a_job_has_the_gpus_it_asked_for(cluster: SlurmCluster, tmp_path: Path) -> None:
    script = 'srun sh -c "echo \\$SLURMD_NODENAME \\$CUDA_VISIBLE_DEVICES" > ' + f"{tmp_path}/out"
    job = cluster.submit("--nodes=2", "--gres=gpu:2", "--wrap", script)
    cluster.wait_until(lambda: cluster.jobs()[job] == "COMPLETED", "the job ends")
    assert sorted(text(tmp_path / "out").split("\n")) == ["", "n1 0,1", "n2 0,1"]


def test_nothing_outside_of_its_folder_is_configured(cluster: SlurmCluster) -> None:
    assert cluster.env == {"SLURM_CONF": f"{cluster.folder}/slurm.conf"}
    config = cluster.client("scontrol", "show", "config")
    for place in ("/etc/slurm", "/var/spool", "/run/munge", "/var/run"):
        lines = [line for line in config.splitlines() if place in line]
        assert not lines, lines
    with pytest.raises(ClusterError, match="Invalid job id"):
        cluster.client("scontrol", "show", "job", "1")


def start_pool(cluster: SlurmCluster, *args: str) -> str:
    """A job on both nodes, with a step on each that goes on; its id."""
    job = cluster.submit("--nodes=2", "--no-kill", *args, "--wrap", "srun --no-kill --overlap sleep 1000; sleep 1000")
    cluster.wait_until(lambda: all(len(cluster.processes(node)) >= 3 for node in cluster.nodes), "it runs")
    return job


def batch_host(cluster: SlurmCluster, job: str) -> str:
    return cluster.client("squeue", "-h", "-j", job, "-o", "%B").strip()


def test_slurmd_and_slurmctld_die_and_the_job_goes_on(cluster: SlurmCluster) -> None:
    job = start_pool(cluster)
    pids = {node: cluster.processes(node) for node in cluster.nodes}
    daemon = cluster.slurmd("n2")
    cluster.kill_slurmd("n2")
    assert cluster.slurmd("n2") is None and cluster.processes("n2") == [p for p in pids["n2"] if p != daemon]
    cluster.kill_controller()
    with pytest.raises(ClusterError, match=r"took more than|Unable to contact"):
        cluster.client("squeue", timeout_s=1)
    cluster.start_controller()
    cluster.restart("n2")
    assert cluster.jobs()[job] == "RUNNING"
    assert set(pids["n1"]) <= set(cluster.processes("n1"))


def test_a_node_crashes_and_comes_back(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = start_pool(cluster)
    (lost,) = set(cluster.nodes) - {batch_host(cluster, job)}
    pids = cluster.processes(lost)
    assert cluster.crash(lost) == len(pids)
    assert not any(map(is_alive, pids))
    cluster.restart(lost)
    assert cluster.slurmd(lost) is not None and cluster.jobs()[job] == "RUNNING"
    after = cluster.submit("--nodelist", lost, "--wrap", f"echo $SLURMD_NODENAME > {tmp_path}/out")
    cluster.wait_until(lambda: cluster.jobs()[after] == "COMPLETED", "the node serves")
    assert text(tmp_path / "out") == f"{lost}\n"


def test_a_node_is_set_down_and_up(cluster: SlurmCluster) -> None:
    job = start_pool(cluster)
    (lost,) = set(cluster.nodes) - {batch_host(cluster, job)}
    cluster.set_down(lost)
    assert cluster.node_states()[lost] == "down"
    cluster.wait_until(lambda: len(cluster.processes(lost)) == 1, "only slurmd is left")
    assert cluster.client("squeue", "-h", "-j", job, "-o", "%T %N").split() == ["RUNNING", batch_host(cluster, job)]
    cluster.set_up(lost)


def test_the_low_partition_is_preempted(cluster: SlurmCluster, tmp_path: Path) -> None:
    on_signal = f"signal.signal(signal.SIGUSR2, lambda *_: (open('{tmp_path}/told', 'w').close(), sys.exit(0)))"
    program = f"import signal, sys, time; {on_signal}; open('{tmp_path}/up', 'w').close(); time.sleep(100)"
    (tmp_path / "victim.py").write_text(program)
    command = f"srun {sys.executable} -S {tmp_path}/victim.py"
    victim = cluster.submit("-p", "low", "-N2", "--exclusive", "--requeue", "--signal=USR2@30", "--wrap", command)
    cluster.wait_until((tmp_path / "up").exists, "the victim runs")
    winner = cluster.submit("-N2", "--exclusive", "--wrap", "sleep 100")
    cluster.wait_until(lambda: cluster.jobs()[winner] == "RUNNING", "the winner runs")
    assert (tmp_path / "told").exists()
    assert cluster.jobs()[victim] == "COMPLETED"  # it left in time; else it would be requeued


STARTER = """
import sys, time
from pathlib import Path
from tests.cluster import SlurmCluster
cluster = SlurmCluster(Path(sys.argv[1]), nodes=2, gpus=1)
cluster.up()
job = cluster.submit("-N2", "--wrap", "srun sh -c 'setsid sleep 1000 & sleep 1000'")
cluster.wait_until(lambda: len(cluster.processes("n2")) >= 4, "the job runs")
print(*cluster.processes(), flush=True)
time.sleep(100)
"""


def test_nothing_outlives_its_starter(tmp_path: Path) -> None:
    require()
    command = [sys.executable, "-c", STARTER, str(tmp_path / "c")]
    starter = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert starter.stdout is not None
    with contextlib.closing(starter.stdout) as said:
        pids = [int(pid) for pid in said.readline().split()]
    assert len(pids) >= 12
    starter.send_signal(signal.SIGKILL)
    starter.wait(20)
    wait_for(lambda: not any(map(is_alive, pids)), "all are dead")


def test_a_command_gets_a_cluster_of_its_own() -> None:
    require()
    shown = ["sh", "-c", "sinfo -h -p main -o '%D %G'; echo $SLURM_CONF; exit 7"]
    command = [sys.executable, "-m", "tests.cluster", "--nodes", "1", "--gpus", "2", "--", *shown]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 7, done.stderr
    nodes, conf = done.stdout.splitlines()
    assert nodes == "1 gpu:fake:2"
    assert conf.endswith("/slurm.conf") and not Path(conf).parent.exists()


def test_job_ids_do_not_come_back(tmp_path: Path) -> None:
    require()
    ids, up_s = [], []
    for _ in range(2):
        started = time.monotonic()
        with SlurmCluster(tmp_path / "c", nodes=1, gpus=0) as cluster:
            up_s.append(time.monotonic() - started)
            ids.append(int(cluster.submit("--hold", "--wrap", "true")))
            pids = cluster.processes("n1")
        assert not any(map(is_alive, pids))
    assert ids[1] > ids[0]
    assert max(up_s) < 20
