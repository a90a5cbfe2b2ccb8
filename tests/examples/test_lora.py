"""The example of adapters, on the quickstart with its real engines, whose one slot serves all roles by turns."""

from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.examples.runs import submit, train
from tests.scenarios.runs import ROOT, STRICT, check_same, checkpoints, measured, pivot, succeed

pytestmark = pytest.mark.vllm
BASE = "configs/quickstart.yaml"
SMALL = ("data.train_batch_size=4", "evaluate.freq=0", "trainer.updates_per_step=1", "checkpoint.save_freq=1")
COLOCATED = ("placement.mode=colocated", "cluster.slots_per_node=1")


def test_the_example_of_adapters_trains_and_its_engine_serves_what_is_merged(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, "lora", *SMALL, *COLOCATED, base=BASE)
    found = measured(run)
    assert all(found[step]["mismatch/max_abs_logprob_diff"] < 1e-4 for step in (1, 2, 3))
    saved = run / "checkpoints" / "step_3"
    policy = load_file(ROOT / "configs" / "quickstart" / "policy" / "model.safetensors")
    merged, adapters = (
        load_file(saved / name) for name in ("model/model.safetensors", "adapter/adapter_model.safetensors")
    )
    changed = {name for name in policy if (policy[name] != merged[name]).any()}
    assert changed == {name for name in policy if "_proj." in name} and len(adapters) == 2 * len(changed)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_r12_a_strict_run_with_adapters_resumes_bit_for_bit(tmp_path: Path) -> None:
    run, options = tmp_path / "run", (*SMALL, *STRICT, "algorithm.kl.coef=0.05")
    train(run, "lora", *options, base=BASE)
    succeed(pivot("resume", str(run), "--step", "1"))
    fork = tmp_path / "run-from1"
    check_same(fork, run)
    assert checkpoints(fork)["step_3"] == checkpoints(run)["step_3"]


def test_a_layer_that_is_not_there_is_refused_at_submit(tmp_path: Path) -> None:
    ended = submit(tmp_path / "run", "lora", "trainer.lora.target_modules=query", base=BASE)
    assert ended.code == 2 and "trainer.lora.target_modules: " in ended.out
    assert "no linear layer 'query'; valid: down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in ended.out
    ended = submit(tmp_path / "run", "lora")
    assert ended.code == 2 and "trainer.lora needs a real trainer" in ended.out
