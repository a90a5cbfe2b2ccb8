"""The wheel as others get it: `python benchmarks/wheel.py [--from-raw FILE]`.

It is built from this checkout and installed, with its `cpu` extra, into an environment of its own, outside of the
checkout; there the quickstart is run, and a configuration of one's own. Keys:

  build_s        checkout to wheel
  install_s      an empty environment to one with the wheel and all that it needs (torch first, as in the Makefile)
  wheel_mb       size of the wheel
  doctor/faults  what `doctor` finds wrong there
  quickstart_s   submit to exit
  gain           held-out accuracy after minus before (points)
  own_s          `new`, two steps of what it wrote, `list`, a third step by `resume`
  outside        1 if the package was imported from that environment, and nothing from the checkout
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import Must, main, parser

MUST = {
    "doctor/faults": Must(at_most=0),
    "gain": Must(at_least=30),
    "outside": Must(at_least=1),
    "wheel_mb": Must(at_most=5),
}
ROOT = Path(__file__).parents[1]
_KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "SSL_CERT_FILE", "http_proxy", "https_proxy", "no_proxy")
_FUNCTION = "def shorter(solution_str, **row):\n    return 1 / (1 + len(solution_str))\n"


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="pivot-wheel-") as folder:
        return Elsewhere(Path(folder)).measure()


class Elsewhere:
    """A folder outside of the checkout, with the environment `env`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python, self.pivot = folder / "env/bin/python", folder / "env/bin/pivot-pipeline"
        self.seconds: dict[str, float] = {}

    def measure(self) -> dict[str, Any]:
        began = time.monotonic()
        self.call(sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", ".", ROOT)
        (wheel,) = self.folder.glob("pivot_pipeline-*.whl")
        began = self.took("build_s", began)
        self.install(wheel)
        self.took("install_s", began)
        where = self.call(self.python, "-P", "-c", "import pipeline; print(pipeline.__file__)").strip()
        doctor = self.call(self.pivot, "doctor", "configs/quickstart.yaml", "--json", codes=(0, 1))
        began = time.monotonic()
        self.call(self.pivot, "submit", "configs/quickstart.yaml", "--name", "q")
        began = self.took("quickstart_s", began)
        self.use_own()
        self.took("own_s", began)
        return {
            "seconds": self.seconds,
            "wheel_bytes": wheel.stat().st_size,
            "is_outside": Path(where).is_relative_to(self.folder / "env"),
            "doctor": json.loads(doctor),
            "summary": json.loads((self.folder / "runs/q/summary.json").read_text()),
        }

    def install(self, wheel: Path) -> None:
        makefile = (ROOT / "Makefile").read_text()
        torch, index = (
            re.findall(rf"^{name} := (\S+)$", makefile, re.MULTILINE)[0] for name in ("TORCH", "PYTORCH_CPU_INDEX")
        )
        self.call(sys._base_executable, "-m", "venv", "env")  # type: ignore[attr-defined]
        pip = (self.python, "-m", "pip", "install", "-q")
        try:
            self.call(*pip, torch)
        except subprocess.CalledProcessError:
            self.call(*pip, "--index-url", index, torch)
        self.call(*pip, "-c", ROOT / "constraints.txt", f"{wheel}[cpu]")

    def use_own(self) -> None:
        """With the models and prompts that the wheel brings, and a function of the user's."""
        (self.folder / "mine.py").write_text(_FUNCTION)
        models = ("--policy", "quickstart/policy", "--data", "quickstart/train.jsonl", "--function", "mine.py:shorter")
        self.call(self.pivot, "new", "mine", *models, "--gpus", "2", "--steps", "2")
        self.call(self.pivot, "submit", "mine/run.yaml", "--name", "m")
        assert [one["run"] for one in json.loads(self.call(self.pivot, "list", "--json"))] == ["q", "m"]
        self.call(self.pivot, "resume", "m", "trainer.total_training_steps=3")
        assert json.loads((self.folder / "runs/m/summary.json").read_text())["steps"] == 3

    def took(self, name: str, began: float) -> float:
        now = time.monotonic()
        self.seconds[name] = now - began
        return now

    def call(self, *command: object, codes: tuple[int, ...] = (0,)) -> str:
        """Output of a command in the folder, without anything of Python's in its environment; pip's own settings
        stay."""
        kept = {name: value for name, value in os.environ.items() if name in _KEPT or name.startswith("PIP_")}
        words = [str(word) for word in command]
        done = subprocess.run(
            words, cwd=self.folder, env=kept | {"OMP_NUM_THREADS": "1"}, stdout=-1, text=True, check=False
        )
        if done.returncode not in codes:
            raise subprocess.CalledProcessError(done.returncode, words, done.stdout)
        return done.stdout


def figures(raw: dict[str, Any]) -> dict[str, float | None]:
    summary = raw["summary"]
    return {
        **raw["seconds"],
        "wheel_mb": raw["wheel_bytes"] / (1 << 20),
        "doctor/faults": float(sum(one["state"] == "fault" for one in raw["doctor"])),
        "gain": 100 * (summary["eval_last"] - summary["eval_first"]) if summary["status"] == "done" else None,
        "outside": float(raw["is_outside"]),
    }


if __name__ == "__main__":
    args = parser(__doc__ or "").parse_args()
    sys.exit(main("wheel", args, measure, figures, MUST))
