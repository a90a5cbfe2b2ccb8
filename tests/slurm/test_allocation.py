"""The script of a run's job, and what may not get into it."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from pipeline.core.errors import ConfigError
from pipeline.run_folder import read_json
from slurm.allocation import Predecessor, script, submit_job
from slurm.names import left_marker
from tests.fakes.sbatch import make, options, write_client, write_clients


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_clients(tmp_path / "bin", monkeypatch)
    return tmp_path / "bin"


def test_a_job_asks_for_what_the_configuration_says(tmp_path: Path, slurm: Path) -> None:
    asked = (
        "partition=gpu",
        "account=17",
        "qos=high",
        "time=2-00:00:00",
        "gres=gpu:a100",
        "cpus_per_slot=8",
        "mem=400G",
    )
    run, config = make(
        tmp_path,
        *(f"cluster.slurm.{one}" for one in asked),
        *("cluster.nodes=3", "cluster.min_nodes=2", "cluster.slots_per_node=4", "cluster.slurm.extra={nice: '7'}"),
    )
    found = options(script(run, config))
    assert found == {
        "partition": "gpu",
        "account": "17",
        "qos": "high",
        "time": "2-00:00:00",
        "gres": "gpu:a100:4",
        "nice": "7",
        "cpus-per-task": "32",
        "mem": "400G",
        "nodes": "2-3",
        "no-kill": "",
        "requeue": "",
        "signal": "USR2@120",
        "job-name": "my_run",
        "open-mode": "append",
        "output": f"'{run.jobs}/%j_0_log.out'",
    } | {"output": found["output"]}
    assert str(run.jobs) in found["output"]


def test_the_controller_is_one_task_on_the_batch_host(tmp_path: Path, slurm: Path) -> None:
    run, config = make(tmp_path, "cluster.nodes=2")
    (line,) = (line for line in script(run, config).splitlines() if "submitit.core._submit" in line)
    asked = set(shlex.split(line))
    assert {"--nodes=1", "--ntasks=1", "--relative=0", "--overlap", "--no-kill", "--kill-on-bad-exit=0"} <= asked


def test_what_is_not_asked_for_is_the_sites_choice(tmp_path: Path, slurm: Path) -> None:
    run, config = make(tmp_path, "cluster.slurm.gres=''")
    text = script(run, config)
    assert not {"time", "partition", "wckey", "ntasks-per-node", "gres"} & options(text).keys()
    assert "--gres" not in text


def test_the_script_is_one_that_a_shell_understands_whatever_the_folder(tmp_path: Path, slurm: Path) -> None:
    run, config = make(tmp_path, 'cluster.slurm.container=apptainer exec "my image.sif"', name='it\'s $(touch x) "r"')
    text = script(run, config)
    checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert options(text)["job-name"] == "it_s___touch_x___r_"
    assert text.count('apptainer exec "my image.sif"') == 3, "each agent, the controller, and what starts the job again"


def test_the_agents_loop_starts_one_again_unless_it_left_for_good(tmp_path: Path, slurm: Path) -> None:
    """The lines themselves, run by bash with an srun that returns 0 twice on each node, as if that were lost."""
    run, config = make(tmp_path)
    loop = next(line for line in script(run, config).splitlines() if line.startswith("for n in"))
    calls, left = tmp_path / "calls", left_marker(run, "17.0", "")
    write_client(slurm, "scontrol", "echo n1; echo n2")
    write_client(
        slurm,
        "srun",
        # With nothing but builtins: the loop kills children of srun.
        f"for a; do case $a in n1|n2) n=$a;; esac; done; echo $n >> {calls}; k=0\n"
        f'while read -r l; do [ $l = $n ] && k=$((k+1)); done < {calls}; [ $k -lt 3 ] || : > "{left}$n"',
    )
    command = ["bash", "-c", f"life=17.0; {loop.replace('sleep 1', 'sleep 0.01')}; wait"]
    environment = {**os.environ, "SLURM_JOB_NODELIST": "n[1-2]"}
    subprocess.run(command, check=True, env=environment)
    assert sorted(calls.read_text().split()) == ["n1"] * 3 + ["n2"] * 3
    run.ended.touch()
    calls.unlink()
    subprocess.run(command, check=True, env=environment)
    assert not calls.exists(), "a run that is over starts nothing"


def test_with_the_second_launcher_the_devices_are_left_to_the_workers_steps(tmp_path: Path, slurm: Path) -> None:
    run, config = make(tmp_path, "cluster.slurm.launcher=step", "cluster.slots_per_node=4")
    text = script(run, config)
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False).stderr == ""
    assert options(text)["gres"] == "gpu:4"
    sruns = [line for line in text.splitlines() if "srun " in line]
    assert len(sruns) == 2 and all("--gres=none" in line and "--gres=gpu" not in line for line in sruns)
    assert text.count("slurm.launcher") == 1
    assert "slurm.launcher" not in script(*make(tmp_path, name="another"))


@pytest.mark.parametrize("is_over", [False, True])
def test_the_last_line_has_a_run_that_is_not_over_start_again(tmp_path: Path, slurm: Path, is_over: bool) -> None:
    run, config = make(tmp_path)
    line = script(run, config).splitlines()[-2]
    for name in ("squeue", "sinfo", "sleep"):
        write_client(slurm, name, f'echo {name} "$@" >> {slurm}/asked; exit 1')
    if is_over:
        run.ended.touch()
    subprocess.run(["bash", "-c", f"life=17.0; {line}"], check=False, stdout=subprocess.DEVNULL)
    asked = (slurm / "asked").read_text() if (slurm / "asked").exists() else ""
    assert asked.startswith("" if is_over else "squeue") and bool(asked) is not is_over


def test_one_in_the_place_of_another_knows_of_it(tmp_path: Path, slurm: Path) -> None:
    run, config = make(tmp_path, "cluster.slurm.exclude=n9")
    assert submit_job(run, config, len, Predecessor("12", 4, ["n1", "n2"])) == "17"
    text = (slurm / "script").read_text()
    assert options(text)["exclude"] == "n9,n1,n2"
    line = next(line for line in text.splitlines() if line.startswith("export PIVOT_"))
    shell = ["bash", "-c", f"{line}; echo $PIVOT_RESTARTS $PIVOT_REPLACES"]
    for restarts, told in (("", "4 12"), ("2", "6 12")):
        said = subprocess.run(shell, env={"SLURM_RESTART_COUNT": restarts}, capture_output=True, text=True, check=True)
        assert said.stdout.strip() == told


def test_a_submission_inherits_nothing_of_the_job_it_is_made_in(
    tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("SLURM_MEM_PER_CPU", "1"), ("SBATCH_PARTITION", "low"), ("SLURM_CONF", "/etc/s.conf")):
        monkeypatch.setenv(name, value)
    run, config = make(tmp_path)
    assert submit_job(run, config, len) == "17" and read_json(run.job) == {"id": "17"}
    given = (slurm / "env").read_text()
    assert "SLURM_MEM_PER_CPU" not in given and "SBATCH_" not in given and "SLURM_CONF=/etc/s.conf" in given
    assert os.environ["SLURM_MEM_PER_CPU"] == "1"


def test_what_sbatch_says_reaches_the_user(tmp_path: Path, slurm: Path) -> None:
    (slurm / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: gpuu' >&2\nexit 1\n")
    run, config = make(tmp_path)
    with pytest.raises(ConfigError, match="invalid partition specified: gpuu"):
        submit_job(run, config, len)


@pytest.mark.parametrize("name", ["a%j", "acc 90%u", "back\\slash", "%%"])
def test_a_path_that_slurm_would_expand_is_refused(tmp_path: Path, slurm: Path, name: str) -> None:
    run, config = make(tmp_path, name=name)
    with pytest.raises(ConfigError, match="--run-dir"):
        submit_job(run, config, len)
    assert not (slurm / "script").exists()


def test_the_users_lines_do_not_change_how_the_others_run(tmp_path: Path, slurm: Path) -> None:
    run, config = make(
        tmp_path, "cluster.slurm.setup=['set -eu -o pipefail']", "cluster.slurm.extra={nice: 7, exclusive: true}"
    )
    text = script(run, config)
    lines = text.splitlines()
    assert lines.index("set -eu -o pipefail") < next(i for i, line in enumerate(lines) if line.startswith("set +eu"))
    assert options(text)["nice"] == "7" and options(text)["exclusive"] == ""


def test_without_slurm_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(shutil.which("sh") or "/bin/sh").parent / "nowhere"))
    run, config = make(tmp_path)
    with pytest.raises(ConfigError, match="there is no Slurm here"):
        script(run, config)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ('cluster.slurm.partition="a\\n#SBATCH --uid=0"', "one line"),
        ("cluster.slurm.extra={'no such': 'x'}", "no long option"),
        ("cluster.slurm.extra={signal: 'KILL@1'}", "set by the run itself"),
        ("cluster.slurm.partitoin=gpu", "partition"),
    ],
)
def test_wrong_options_are_refused_with_what_is_right(tmp_path: Path, override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make(tmp_path, override)
