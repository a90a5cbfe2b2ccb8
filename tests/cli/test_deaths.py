"""Whole runs of emulated engines whose parts die: what the user sees, and what is left."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from pipeline.run_folder import RunFolder, read_json
from slurm.names import gps_base, user_prefix
from tests.cli.test_full import ENDLESS
from tests.cli.test_submit import begin, metric_steps, step_of, until
from tests.scenarios.runs import pids_of

QUICK = ("limits.heartbeat_s=1", "checkpoint.save_freq=2")


def find(run: Path, module: str) -> int:
    """The live process of the run that runs this module; `rollout-0` and so on are forks of the zygote."""
    status = read_json(run / "status.json")
    below = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids_of(run)}
    named = [pid for pid, line in below.items() if module.encode() in line]
    zygotes = [pid for pid in named if parent(pid) not in named]
    assert len(zygotes) == 1, (module, below, status)
    return zygotes[0]


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def events(run: Path, kind: str) -> list[dict[str, object]]:
    lines = (run / "journal" / "attempt_1.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def leftovers(run: Path) -> list[str]:
    """Processes, shared memory and temporary files of the run's first attempt."""
    base = gps_base(RunFolder(run), 1, "local-0")
    token = base.removeprefix(user_prefix()).partition("-")[0]
    files = [name for name in os.listdir("/dev/shm") if name.startswith(base)]
    return [*map(str, pids_of(run)), *files, *(n for n in os.listdir("/tmp") if n.startswith(user_prefix() + token))]


@pytest.mark.slow  # tests/scenarios/test_faults.py has these deaths, too
def test_a_run_outlives_the_deaths_of_its_agent_its_zygote_and_its_queue_server(tmp_path: Path) -> None:
    run = tmp_path / "my run"
    process = begin(tmp_path, "submit", "configs/emulated.yaml", "--run-dir", str(run), *ENDLESS, *QUICK)
    deaths = [
        ("slurm.agent", signal.SIGKILL),
        ("slurm.agent", signal.SIGSTOP),
        ("slurm.zygote", signal.SIGKILL),
        ("pipeline.queue.server", signal.SIGKILL),
        ("pipeline.queue.server", signal.SIGSTOP),
    ]
    for module, sig in deaths:
        reached = step_of(run) + 2
        until(lambda reached=reached: step_of(run) >= reached, process)
        victim, start = find(run, module), time.monotonic()
        os.kill(victim, sig)
        until(lambda victim=victim: not Path(f"/proc/{victim}").exists(), process)
        reached = metric_steps(run)[-1] + 2
        until(lambda reached=reached: metric_steps(run)[-1] >= reached, process)
        print(f"{module} {sig.name}: two steps more after {time.monotonic() - start:.2f} s")
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130, out
    assert metric_steps(run) == list(range(1, metric_steps(run)[-1] + 1))
    lost = [str(event["reason"]) for event in events(run, "NodeLost")]
    assert [reason.partition("(")[0].partition("\n")[0] for reason in lost] == [
        "its agent ended: killed by SIGKILL",
        lost[1].partition("(")[0],
        "the zygote ended: killed by SIGKILL",
    ]
    assert lost[1].startswith("its agent was silent for ") and "(limits.heartbeat_s)" in lost[1]
    assert "agent of local-0 leaves: the zygote ended" in lost[2] and "leaves" not in lost[0]  # the tail is this life's
    joined = [event["version"] for event in events(run, "NodeJoined")]
    assert len(joined) == 4 and joined == sorted(joined) and joined[-1] > 0
    log = (run / "logs" / "controller.log").read_text()
    assert log.count("the queue server ended (killed by SIGKILL) and is started again") == 1
    assert log.count("(limits.heartbeat_s)) and is started again") == 1
    assert leftovers(run) == [] and not list((run / "secrets").glob("queue-*.json"))


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("slurm.agent", "node local-0 was lost 1 times without progress: its agent ended: killed by SIGKILL"),
        ("slurm.zygote", "node local-0 was lost 1 times without progress: the zygote ended: killed by SIGKILL"),
        ("pipeline.queue.server", "the queue server ended 1 times without progress (killed by SIGKILL)"),
        ("_controller", "the controller ended without a word: killed by SIGKILL"),
    ],
)
def test_r27_the_first_cause_reaches_the_command(tmp_path: Path, module: str, said: str) -> None:
    run = tmp_path / "r"
    process = begin(tmp_path, "submit", "configs/emulated.yaml", "--run-dir", str(run), *ENDLESS, "limits.restarts=0")
    until(lambda: step_of(run) >= 2, process)
    start = time.monotonic()
    os.kill(find(run, module), signal.SIGKILL)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and said in out and "pivot-pipeline resume" in out, out
    assert "Traceback" not in out
    until(lambda: leftovers(run) == [])
    assert time.monotonic() - start < 10


def test_r26_of_two_runs_one_is_killed_and_the_other_does_not_notice(tmp_path: Path) -> None:
    runs = [tmp_path / "a", tmp_path / "b"]
    processes = [begin(tmp_path, "submit", "configs/emulated.yaml", "--run-dir", str(run), *ENDLESS) for run in runs]
    for run, process in zip(runs, processes, strict=True):
        until(lambda run=run: step_of(run) >= 2, process)
    mine = leftovers(runs[1])
    assert len(mine) > 10
    for pid in (processes[0].pid, *pids_of(runs[0])):
        os.kill(pid, signal.SIGKILL)
    start = time.monotonic()
    processes[0].communicate(timeout=60)
    until(lambda: leftovers(runs[0]) == [])
    assert time.monotonic() - start < 10
    resumed = begin(tmp_path, "resume", str(runs[0]))  # its janitor passes by
    reached = step_of(runs[0]) + 1
    until(lambda: step_of(runs[0]) > reached, resumed)
    reached = step_of(runs[1])
    until(lambda: step_of(runs[1]) > reached, processes[1])
    assert leftovers(runs[1]) == mine
    for process in (resumed, processes[1]):
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 130, out


def test_ctrl_c_within_the_first_second_leaves_no_traceback(tmp_path: Path) -> None:
    for number, after_s in enumerate((0.1, 0.4, 0.7, 1.0)):
        run = tmp_path / f"r{number}"
        process = begin(tmp_path, "submit", "configs/emulated.yaml", "--run-dir", str(run), *ENDLESS)
        time.sleep(after_s)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 130, (after_s, out)
        log = run / "logs" / "controller.log"
        assert "Traceback" not in out + (log.read_text() if log.exists() else ""), (after_s, out)
        if log.exists():
            assert read_json(run / "status.json")["status"] == "cancelled"
            assert leftovers(run) == []
