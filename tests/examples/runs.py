"""Examples trained for three steps: after the emulated configuration, which needs no model, or after another."""

from pathlib import Path

from tests.scenarios.runs import ROOT, Ended, measured, pivot, sequences, succeed

EXAMPLES = ROOT / "configs" / "examples"
STEPS = ("trainer.total_training_steps=3", "tracking.uri=none")


def train(run: Path, example: str, *overrides: str, base: str = "configs/emulated.yaml") -> str:
    """The run's output. Each of its sequences was trained, or dropped with a reason."""
    out = succeed(submit(run, example, *overrides, base=base))
    rows = measured(run)
    assert sorted(step for step in rows if step) == [1, 2, 3]
    for step, of_step in sequences(run).items():
        assert rows[step]["queue/num_trained"] + rows[step]["queue/num_dropped"] == len(of_step)
        assert all(row.state in ("trained", "dropped") for row in of_step)
    return out


def submit(run: Path, example: str, *overrides: str, base: str = "configs/emulated.yaml") -> Ended:
    config = str(EXAMPLES / f"{example}.yaml")
    return pivot("submit", base, config, "--run-dir", str(run), "--wait", *STEPS, *overrides)
