"""The likeliest mistakes of a beginner: each is named at once, with what is valid and where to look; nothing starts."""

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.config import load_files, save_resolved
from pipeline.run_folder import RunFolder, write_json
from tests.cli.conftest import CHECKOUT, Done, Pivot, environment
from tests.cli.private import small_disk
from tests.slurm.clients import FakeSlurm

QUICK, PLAIN = "quickstart.yaml", "emulated.yaml"
MIB = 1 << 20


def given(*arguments: str, says: list[str], name: str) -> object:
    return pytest.param(arguments, says, id=name)


MODELS = [
    given(QUICK, "model.policy.path=gone", says=["model.policy.path: no such folder", "config.json"], name="path"),
    given(
        QUICK,
        "model.policy.path=Qwen/Qwen3-8B",
        says=["model.policy.path", "hf download Qwen/Qwen3-8B --local-dir Qwen/Qwen3-8B"],
        name="hub",
    ),
    given(
        QUICK,
        "model.policy.path=no_template",
        says=[
            "model.policy.path: ",
            "no chat template (chat_template.jinja, or chat_template in tokenizer_config.json)",
        ],
        name="chat template",
    ),
    given(
        QUICK,
        "model.genrm.path=no_pad",
        says=["model.genrm.path: ", "no pad_token", "the EOS token will do"],
        name="pad",
    ),
    given(
        QUICK,
        "model.policy.path=other_tokenizer",
        says=["model.policy.path: ", "tokenizer.json has 108 tokens", "vocab_size in config.json is 5"],
        name="another tokenizer",
    ),
    given(
        PLAIN,
        "model.policy.tensor_parallel=4",
        says=["model.policy.tensor_parallel is 4", "cluster.slots_per_node is 3: valid is 1 to 3"],
        name="tensor parallel",
    ),
    given(
        PLAIN,
        "cluster.slots_per_node=2",
        says=["want 3 slots, the cluster has 2", "cluster.slots_per_node 2"],
        name="slots",
    ),
    given(
        QUICK,
        "rollout.max_response_length=400",
        says=["data.max_prompt_length 32 + rollout.max_response_length 400 exceed the 256 positions", "config.json"],
        name="context of the policy",
    ),
]
JUDGE = [
    given(
        PLAIN,
        "reward.genrm.template='{{ prompt }}'",
        says=["reward.genrm.template: it never shows the {{ response }}"],
        name="template without a response",
    ),
    given(
        PLAIN,
        "reward.genrm.template='{% if %}{{ response }}'",
        says=["reward.genrm.template, line 1: "],
        name="template's syntax",
    ),
    given(
        PLAIN,
        "reward.genrm.template='{{ response }} {{ answer }}'",
        says=["unknown variable 'answer'; valid: prompt, response, messages"],
        name="template's variable",
    ),
    given(
        PLAIN, "reward.genrm.template=my.jinja", says=["reward.genrm.template: no such file: my.jinja"], name="template"
    ),
    given(
        PLAIN,
        "reward.genrm.template={{ response }} is it?",
        says=[
            "the override 'reward.genrm.template=",
            "quoted twice for a shell: reward.genrm.template='\"{{ response }}",
        ],
        name="unquoted",
    ),
    given(
        QUICK,
        "reward.genrm.max_tokens=3",
        says=["reward.genrm.max_tokens is 3", "'Verdict:right' and its end take 10 tokens", "at least 10"],
        name="no verdict fits",
    ),
    given(
        QUICK,
        "reward.genrm.max_tokens=250",
        says=["reward.genrm.max_tokens 250 + 10 tokens of reward.genrm.template", "256 positions of the judge"],
        name="context of the judge",
    ),
    given(
        PLAIN,
        "reward.genrm.endpoint={url: 'localhost:8000', model: m}",
        says=["reward.genrm.endpoint.url", "'localhost:8000'", "http://"],
        name="no URL",
    ),
    given(
        PLAIN,
        "reward.genrm.endpoint={url: 'http://127.0.0.1:1/v1', model: m, key_variable: NO_SUCH_KEY}",
        says=["reward.genrm.endpoint.key_variable: there is no variable NO_SUCH_KEY in this environment"],
        name="key",
    ),
]
DATA = [
    given(PLAIN, "data.train_files=gone.jsonl", says=["data.train_files: ", "gone.jsonl: no such file"], name="file"),
    given(
        PLAIN,
        "data.train_files=column.jsonl",
        says=["column.jsonl, line 1, column 'question' is unknown; valid: prompt, ", "set data.prompt_key to it"],
        name="column",
    ),
    given(
        PLAIN,
        "data.train_files=empty.jsonl",
        says=["data.train_files: ", "empty.jsonl: the file has no row"],
        name="empty",
    ),
    given(PLAIN, "data.train_files=broken.jsonl", says=["broken.jsonl, line 2: bad JSON at character 1"], name="row"),
    given(
        PLAIN,
        "data.train_batch_size=9",
        says=["data.train_batch_size is 9, but data.train_files hold 8 rows: valid is 1 to 8"],
        name="batch",
    ),
    given(
        PLAIN,
        "trainer.updates_per_step=5",
        says=["trainer.updates_per_step 5 exceeds data.train_batch_size 4", "one whole group"],
        name="updates",
    ),
    given(
        PLAIN,
        "evaluate.freq=1",
        says=["evaluate.freq is 1 but data.val_files is empty", "set it to 0"],
        name="evaluation",
    ),
]
KEYS = [
    given(
        PLAIN,
        "trainer.lrr=1",
        says=["trainer.lrr (override): no such key (given 1); did you mean trainer.lr?"],
        name="key",
    ),
    given(
        PLAIN, "trainer.save_freq=1", says=["trainer.save_freq", "save_freq belongs under checkpoint"], name="section"
    ),
    given(
        PLAIN,
        "trainer.lr",
        says=["'trainer.lr' names no file; a setting needs a value: trainer.lr=VALUE"],
        name="value",
    ),
    given(PLAIN, "rollout.n=[4]", says=["rollout.n (override): given [4]; valid: a whole number >= 2"], name="type"),
    given(PLAIN, "trainer.lr=fast", says=["trainer.lr (override): given 'fast'", "a number > 0"], name="number"),
    given(PLAIN, "model.policy.dtype=fp16", says=["given 'fp16'", "float32 or bfloat16 or float16"], name="choice"),
    given("mine.yaml", says=["mine.yaml, line 2, column 3", "the key 'lr' stands here twice"], name="YAML"),
    given(
        "yours.yaml",
        says=["no such configuration file: yours.yaml", "packaged ones: configs/emulated.yaml"],
        name="config",
    ),
    given(
        PLAIN,
        "tracking.uri=ftp://h",
        says=["tracking.uri 'ftp://h' is no MLflow store; valid: one of http://"],
        name="MLflow",
    ),
    given(
        PLAIN, "checkpoint.uri=s4://b", says=["checkpoint.uri 's4://b': fsspec knows no protocol 's4'"], name="store"
    ),
]
OWN = [
    given(
        PLAIN,
        "reward.functions={f: {path: 'gone.py:f'}}",
        says=["reward.functions.f.path: ", "gone.py cannot be read: No such file"],
        name="file of a function",
    ),
    given(
        PLAIN,
        "reward.functions={f: {path: 'own.py:compute_scores'}}",
        says=["own.py has no 'compute_scores' (did you mean compute_score?)"],
        name="function",
    ),
    given(
        PLAIN,
        "reward.functions={f: {path: 'own.py:compute_score'}}",
        says=[
            "own.py, line 1: compute_score(solution, truth) takes no solution_str",
            "valid: def compute_score(data_source",
        ],
        name="signature",
    ),
    given(
        PLAIN,
        "rollout.function=own.py:talk",
        says=["rollout.function: ", "talk(client, **row) is not async; valid: async def name(client, **row)"],
        name="rollout",
    ),
    given(
        PLAIN,
        "stages=[{name: mine, path: 'mine.stage:run'}]",
        says=["stages.0.path 'mine.stage:run': no module 'mine' in run.code_path [] or installed"],
        name="module",
    ),
    given(
        PLAIN,
        "stages=[{name: mine, path: 'stages.checkers:digit_sorts'}]",
        says=["stages.0.path: ", "checkers.py has no 'digit_sorts' (did you mean digit_sort?)"],
        name="name in a module",
    ),
    given(
        PLAIN,
        "stages=[{name: mine, path: 'own.py:talk', after: [judge]}]",
        says=["stages.0.after: no stage 'judge'; valid: prompts, rollout, reward"],
        name="stage",
    ),
    given(PLAIN, "run.code_path=gone", says=["run.code_path: no such folder: "], name="folder of modules"),
]
SLURM = [
    given(PLAIN, "cluster.slurm.time=soon", says=["cluster.slurm.time", "'soon'", "1:30:00"], name="time"),
    given(
        PLAIN,
        "cluster.slurm.time='00:02:00'",
        says=["cluster.slurm: time 00:02:00 is 120 s", "signal_s 120", "no step would be left"],
        name="time limit",
    ),
]


def refused(done: Done, says: list[str]) -> None:
    assert done.code == 2 and done.out == "", done
    assert done.err.startswith("Error: ") and "Traceback" not in done.err
    for words in says:
        assert words in done.err, done.err


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The working directory, with what the mistakes are made of."""
    for name in ("no_template", "no_pad", "other_tokenizer"):
        shutil.copytree(CHECKOUT / "configs/quickstart/policy", tmp_path / name)
    (tmp_path / "no_template/chat_template.jinja").unlink()
    for file, key, value in (
        ("no_pad/tokenizer_config", "pad_token", None),
        ("other_tokenizer/config", "vocab_size", 5),
    ):
        path = tmp_path / f"{file}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    (tmp_path / "column.jsonl").write_text('{"question": "why?"}\n')
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "broken.jsonl").write_text('{"prompt": "why?"}\n{"prompt":\n')
    (tmp_path / "own.py").write_text("def compute_score(solution, truth): ...\n\ndef talk(client, **row): ...\n")
    (tmp_path / "mine.yaml").write_text("trainer:\n  lr: 1\n  lr: 2\n")
    return tmp_path


@pytest.mark.parametrize(("arguments", "says"), [*MODELS, *JUDGE, *DATA, *KEYS, *OWN, *SLURM])
def test_it_is_said_before_anything_starts(pivot: Pivot, folder: Path, arguments: list[str], says: list[str]) -> None:
    refused(pivot("submit", *arguments), says)
    assert not (folder / "runs").exists()
    refused(pivot("validate", *arguments), says)


def test_a_judge_that_nobody_serves(pivot: Pivot) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        endpoint = f"reward.genrm.endpoint={{url: 'http://127.0.0.1:{port}/v1', model: m}}"
        assert pivot("validate", PLAIN, endpoint).code == 0
    refused(
        pivot("validate", PLAIN, endpoint), ["reward.genrm.endpoint.url: nobody listens at 127.0.0.1:", "/v1/models"]
    )
    notes = pivot("validate", PLAIN, endpoint, "cluster.kind=slurm", "cluster.slurm.partition=")
    assert notes.code == 0 and "not checked: whether the nodes reach http://127.0.0.1" in notes.out


def test_slurm_that_is_not_there_and_a_partition_that_it_lacks(
    pivot: Pivot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nothing").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    refused(
        pivot("submit", PLAIN, "--cluster", "slurm"),
        ["cluster.kind is slurm, but there is no Slurm here", "--cluster local"],
    )
    fake = FakeSlurm(tmp_path / "bin")
    fake.script("sbatch", "exit 1")
    fake.script("sinfo", "printf 'cpu*\\ngpu-long\\n'")
    monkeypatch.setenv("PATH", fake.environment["PATH"])
    asked = ["submit", PLAIN, "--cluster", "slurm", "cluster.slurm.partition=gpu_long"]
    refused(pivot(*asked), ["no partition 'gpu_long' (did you mean gpu-long?); valid: cpu, gpu-long", "sinfo"])
    assert fake.calls("sbatch") == [] and not (tmp_path / "runs").exists()
    assert pivot("validate", PLAIN, "cluster.kind=slurm", "cluster.slurm.partition='cpu,gpu-long'").code == 0


def test_a_folder_that_holds_a_run_and_a_run_that_goes_on_already(pivot: Pivot, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "runs" / "mine")
    run.create()
    save_resolved(load_files(["emulated.yaml"]), run.config)
    write_json(run.status, {"run": "mine", "status": "running", "attempt": 1, "pid": 1 << 22, "pid_start": 5})
    refused(pivot("submit", PLAIN, "--name", "mine"), ["runs/mine holds a run", "pivot-pipeline resume mine", "--name"])
    lock = run.hold()
    refused(pivot("_controller", str(run.path)), ["mine goes on already: another controller holds"])
    assert lock >= 0


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("run.seed=5", ["run.seed from 1 to 5", "free to change are trainer.total_training_steps"]),
        ("data.shuffle=false", ["data.shuffle from True to False", "start a new run"]),
        (
            "rollout.tempperature=2",
            ["rollout.tempperature (override): no such key", "did you mean rollout.temperature?"],
        ),
    ],
)
def test_a_resume_that_would_change_what_is_trained(
    pivot: Pivot, tmp_path: Path, setting: str, says: list[str]
) -> None:
    run = RunFolder(tmp_path / "runs" / "mine")
    run.create()
    save_resolved(load_files(["emulated.yaml"]), run.config)
    refused(pivot("resume", "mine", setting), says)


def test_a_disk_too_small_for_checkpoints_and_shared_memory_for_weights(tmp_path: Path) -> None:
    def out(disk_folder: Path, size: str, *arguments: str) -> str:
        with small_disk(disk_folder, size) as disk:
            process = disk.begin(tmp_path, "submit", QUICK, *arguments)
            said, _ = process.communicate(timeout=60)
            assert process.returncode == 2 and "Traceback" not in said, said
            return said

    said = out(tmp_path / "disk", "3m", "--run-dir", str(tmp_path / "disk" / "r"))
    for words in ("checkpoints need 3.96 MiB (3 of 1.32 MiB: checkpoint.keep 2", "disk has", "checkpoint.uri"):
        assert words in said, said
    said = out(Path("/dev/shm"), "1m")
    for words in (
        "the weights need 1.32 MiB of shared memory on each node (policy, two versions",
        "/dev/shm has 1.00 MiB free",
    ):
        assert words in said, said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("version", [(3, 10, 14), (3, 12, 1)])
def test_another_python(version: tuple[int, int, int]) -> None:
    code = f"import sys; sys.version_info = {version}; from pipeline.cli.main import run; sys.exit(run(['--help']))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=CHECKOUT, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and done.stdout == ""
    assert f"this is Python 3.{version[1]}, and pivot-pipeline needs 3.11: python3.11 -m venv" in done.stderr
