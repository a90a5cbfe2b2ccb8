"""The report of a long run of many slots, and what is kept for it: `python benchmarks/report.py [--run FOLDER]`.

An emulated run of 32 slots and 200 steps on the real control plane, whose GPUs change roles (some minutes; --steps and
--slots make another one, --run takes one that is there). Its report is built by the command line, three times, and
opened in a headless Chromium. Keys:

  steps, slots            of the run
  build_s/max             `pivot-pipeline report`, from start to exit; of 3
  page_mb                 the page
  timeline_kb_per_step    of timeline.jsonl; samples_kb and decisions_kb_per_step of the others
  ready_s/max             in Chromium: from the request for the page until all is drawn and a hand can use it; of 5
  zoom_ms/max             from a drag over the slots to all charts drawn anew; of 10
  complaints              what the console, the page's policy and its scripts said
  requests                what the page asked for, besides itself
  look_us/p50             what a look at all slots takes the controller's loop, ten times a second, at 128 slots
  picture_us/p50          what status.json has of it, four times a second, at 128 slots
  status_us/p50           the same with the workers, and written
  core_share/128          of one core, for these, at 128 slots
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import Must, main, parser, percentile

from benchmarks.quickstart import ENTRY
from pipeline.config import load_files
from pipeline.core.events import Role
from pipeline.run_folder import RunFolder
from pipeline.status import StatusFile
from pipeline.watching.seen import Seen
from tests.fakes.blocks import FakeCore
from tests.fakes.chromium import Chromium, program
from tests.fakes.plan import make_plan

MUST = {
    "steps": Must(at_least=200),
    "slots": Must(at_least=32),
    "build_s/max": Must(at_most=10),
    "page_mb": Must(at_most=8),
    "ready_s/max": Must(at_most=2),
    "complaints": Must(at_most=0),
    "requests": Must(at_most=0),
    "core_share/128": Must(at_most=0.05),
}
CONFIG = Path(__file__).parents[1] / "configs/emulated.yaml"
PER_NODE, MANY = 8, 128
LOOKS_PER_S, WRITES_PER_S = 10, 4


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="pivot-report-") as folder:
        run = args.run or make_run(Path(folder) / "run", args.steps, args.slots)
        page = Path(folder) / "report.html"
        build_s = [built(run, page) for _ in range(3)]
        sizes = {path.name: path.stat().st_size for path in (*run.glob("*.jsonl"), *run.glob("planner/*.jsonl"), page)}
        return {"build_s": build_s, "sizes": sizes, **opened(page), **watched(Path(folder))}


def make_run(folder: Path, steps: int, slots: int) -> Path:
    changes = [
        f"cluster.nodes={slots // PER_NODE}",
        f"cluster.slots_per_node={PER_NODE}",
        f"trainer.total_training_steps={steps}",
        "data.train_batch_size=8",
        "rollout.n=16",
        "rollout.engine.options.step_s=0.02",
        "reward.genrm.engine.options.step_s=0.02",
        "checkpoint.save_freq=50",
    ]
    began = time.monotonic()
    command = [*ENTRY, "submit", str(CONFIG), "placement/shiftable.yaml", *changes, "--run-dir", str(folder), "--wait"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    print(f"report: {steps} steps on {slots} slots took {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return folder


def built(run: Path, page: Path) -> float:
    began = time.monotonic()
    subprocess.run([*ENTRY, "report", str(run), "-o", str(page)], check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


def opened(page: Path) -> dict[str, Any]:
    """What a browser makes of it; `steps` and `slots` are those that it shows."""
    path = program()
    if path is None:
        raise SystemExit("no Chromium here: apt-get install chromium")
    ready_s, zoom_ms = [], []
    complaints: list[str] = []
    requests: list[str] = []
    with Chromium(path) as browser:
        for _ in range(5):
            browser.open(page)
            ready_s.append(float(browser.until("document.documentElement.dataset.ready")) / 1e3)
            complaints += browser.errors
            requests += [url for url in browser.requests if url != page.absolute().as_uri()]
        shown = browser.evaluate(_SHOWN)
        for number in range(10):
            zoom_ms.append(browser.evaluate(_ZOOM % (number / 20, number / 20 + 0.3)))
        complaints += browser.errors
    return {"ready_s": ready_s, "zoom_ms": zoom_ms, "complaints": complaints, "requests": requests, **shown}


_SHOWN = """(({charts, steps}) => ({steps: steps.length, slots: charts.slots.rows.length}))(
    JSON.parse(document.getElementById('data').textContent))"""
_ZOOM = """(async () => {
    const canvas = document.querySelector('#slots > canvas'), box = canvas.getBoundingClientRect();
    const at = (share, kind) => canvas.dispatchEvent(new PointerEvent(kind, {
        pointerId: 1, bubbles: true, clientX: box.left + 78 + share * (box.width - 92), clientY: box.top + 40,
    }));
    canvas.setPointerCapture = () => {};
    const began = performance.now();
    at(%f, 'pointerdown'); at(%f, 'pointerup');
    await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
    const took = performance.now() - began;
    canvas.dispatchEvent(new MouseEvent('dblclick', {bubbles: true}));
    await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
    return took;
})()"""


def watched(folder: Path) -> dict[str, Any]:
    """What the controller spends on it, at `MANY` slots, each with a worker of every role, and 2,048 sequences."""
    plan = make_plan(sequences_per_step=1024, total_steps=9, staleness=1, is_streaming=True)
    core = FakeCore(plan, MANY, per_node=PER_NODE, train=(MANY - 1,))
    core.bind(Role.ROLLOUT, *range(MANY // 2))
    core.bind(Role.REWARD, *range(MANY // 2, MANY))
    for step in (1, 2):
        ids = core.admit(step)
        core.steps[step].started["prompts"] = 0.0
        for role, first in ((Role.ROLLOUT, 0), (Role.REWARD, MANY // 2)):
            tasks = {f"{role}-{step}-{i}": f"{role}-{first + i}" for i in range(MANY // 2)}
            core.steps[step].tasks[role.value] = tasks
        for number, id in enumerate(ids):
            core.sequences.dispatch(id, f"rollout-{step}-{number % (MANY // 2)}")
    run = RunFolder(folder / "watched")
    run.create()
    status = StatusFile(run, load_files([CONFIG]), 1, 1)
    seen = Seen(core, 1, 0.0, 0.0)
    samples: dict[str, list[float]] = {"look": [], "picture": [], "status": []}
    for number in range(300):
        now = 0.2 * number
        samples["look"].append(timed(lambda now=now: list(seen.history.look(now))))  # type: ignore[misc]
        samples["picture"].append(timed(lambda now=now: seen.picture(now, now)))  # type: ignore[misc]
        workers = [
            {"name": w.name, "role": w.role, "node": w.node, "slots": w.slots, "state": w.state}
            for w in core.fleet.workers.values()
        ]
        samples["status"].append(timed(lambda now=now, w=workers: status.write(workers=w, **seen.picture(now, now))))  # type: ignore[misc]
    return {"watched": samples}


def timed(call: Any) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def figures(raw: dict[str, Any]) -> dict[str, float | None]:
    steps, sizes, watched = raw["steps"], raw["sizes"], raw["watched"]
    us = {what: 1e6 * percentile(samples, 0.5) for what, samples in watched.items()}
    return {
        "steps": steps,
        "slots": raw["slots"],
        "build_s/max": max(raw["build_s"]),
        "page_mb": sizes["report.html"] / 1e6,
        "timeline_kb_per_step": sizes["timeline.jsonl"] / 1e3 / steps,
        "decisions_kb_per_step": sizes.get("decisions.jsonl", 0) / 1e3 / steps,
        "samples_kb": sizes.get("judge_samples.jsonl", 0) / 1e3,
        "ready_s/max": max(raw["ready_s"]),
        "zoom_ms/max": max(raw["zoom_ms"]),
        "complaints": len(raw["complaints"]),
        "requests": len(raw["requests"]),
        "look_us/p50": us["look"],
        "picture_us/p50": us["picture"],
        "status_us/p50": us["status"],
        "core_share/128": 1e-6 * (LOOKS_PER_S * us["look"] + WRITES_PER_S * us["status"]),
    }


if __name__ == "__main__":
    made = parser(__doc__)
    made.add_argument("--run", type=Path, help="the folder of a run that is there")
    made.add_argument("--steps", type=int, default=200)
    made.add_argument("--slots", type=int, default=32)
    sys.exit(main("report", made.parse_args(), measure, figures, MUST))
