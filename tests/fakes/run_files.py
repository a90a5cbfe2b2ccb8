"""The folder of a run that never was, in the form that runs leave: of any number of steps and slots."""

import json
import random
from pathlib import Path
from typing import Any

from pipeline.config import load_files, save_resolved
from pipeline.run_folder import RunFolder, write_json
from pipeline.samples import clipped
from pipeline.watching.history import length_bin

ROOT = Path(__file__).parents[2]
BEGAN, STEP_S, CLOCK = 1_700_000_000.0, 10.0, 500.0
"""When it began, how long a step took, and what the controller's clock said then."""
SEQUENCES = 1024
WORDS = [
    "the",
    "policy",
    "reasons",
    "about",
    "each",
    "digit",
    "and",
    "then",
    "writes",
    "the",
    "answer",
    "below",
    "<b>&amp;",
    "so",
    "on</b>",
]


class RunFiles:
    """`text`: what stands wherever a model, a log or a user wrote something."""

    def __init__(
        self, folder: Path, num_steps: int, num_slots: int, *changes: str, text: str = "", seed: int = 0
    ) -> None:
        self.run, self.text, self.rng = RunFolder(folder), text, random.Random(seed)
        self.num_steps, self.num_slots = num_steps, num_slots
        self.run.create()
        self.run.attempt_marker(1).touch()
        save_resolved(load_files([ROOT / "configs/emulated.yaml"], list(changes)), self.run.config)
        self._write(self.run.timeline, self._timeline())
        self._write(self.run.decisions, self._decisions())
        self._write(self.run.judge_samples, self._samples())
        rows = [{"step": step, "time": self.at(step + 1), **self.row(step)} for step in range(1, num_steps + 1)]
        self.run.metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        ended = {"status": "done", "attempt": 1, "total_steps": num_steps, "updated": self.at(num_steps + 1)}
        write_json(self.run.status, {"run": self.run.name, "pid": None, "started": BEGAN, **ended})
        write_json(self.run.summary, {"tokens_per_s": 1234.5, "reward_first": 0.1, "reward_last": 0.9})
        write_json(self.run.environment, {"host": text or "host", "packages": {"torch": "2.13.0"}, "gpus": []})

    @staticmethod
    def at(step: float) -> float:
        """When the step begins; the first one after 10 s."""
        return BEGAN + STEP_S * step

    def row(self, step: int) -> dict[str, float | None]:
        noise = self.rng.random()
        return {
            "critic/score/mean": step / self.num_steps,
            "critic/score/min": 0.0,
            "critic/score/max": 1.0,
            "val/acc": 0.5 + 0.4 * step / self.num_steps if step % 5 == 0 else None,
            "response_length/mean": 800 + 100 * noise,
            "response_length/max": 16384.0,
            "response_length/clip_ratio": 0.03 * noise,
            "staleness/mean": 0.4,
            "staleness/max": 1.0,
            "timing_s/step": STEP_S,
            "timing_s/rollout": 6.0,
            "timing_s/reward": 5.0,
            "timing_s/train": 1.0,
            "timing_s/publish": 0.2,
            "timing_s/control": 0.1,
            "perf/total_num_tokens": 8e5,
            "genrm/num_verdicts": float(SEQUENCES),
            "genrm/num_failed": 31.0,
            "genrm/failed_truncated": 24.0,
            f"genrm/failed_{self.text or 'empty'}": 7.0,
            "queue/num_trained": SEQUENCES - 31.0,
            "queue/num_dropped": 31.0,
            "actor/entropy": 1.0 - 0.5 * step / self.num_steps,
        }

    def _write(self, path: Path, lines: list[dict[str, Any]]) -> None:
        path.write_text("".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in lines))

    def _line(self, kind: str, at: float, **more: Any) -> dict[str, Any]:
        """Written a little later than it became true."""
        return {"kind": kind, "attempt": 1, "at": at - BEGAN + CLOCK, "wall": at + self.rng.uniform(0, 0.05), **more}

    def _timeline(self) -> list[dict[str, Any]]:
        names = {str(i): f"node-{i // 8}:{i % 8}" for i in range(self.num_slots)}
        lines = [self._line("slots", BEGAN, names=names, changes=[[0, i, "S"] for i in range(self.num_slots)])]
        for step in range(1, self.num_steps + 1):
            lines += self._slots_of(step)
            recorded = self.at(step + 1)
            spans = [["prompts", -9900, -9800], ["rollout", -9800, -3800], ["reward", -8000, -3000]]
            spans += [["train", -2900, -1900], ["publish", -1900, -1700], ["record", -20, 0]]
            told = {"rollout": self._lengths(6.5), "reward": self._lengths(5.0)}
            lines.append(self._line("step", recorded, step=step, spans=spans, lengths=told))
            lines += [
                self._line("load", self.at(step) + t, rollout=[700 - 100 * t, 10, 5e4 + t], reward=[90.0 * t, 0, 2e4])
                for t in (1, 3, 5, 7, 9)
            ]
        return sorted(lines, key=lambda line: line["at"])

    def _slots_of(self, step: int) -> list[dict[str, Any]]:
        """Each rolls out, is idle for a moment, judges, some train: two shifts of each."""
        start, changes = self.at(step), []
        for slot in range(self.num_slots):
            half = 3.0 + 2.0 * slot / self.num_slots + self.rng.random()
            trains = slot >= self.num_slots * 3 // 4
            turns = [(0.0, "R"), (half, "r"), (half + 0.3, "X"), (half + 0.6, "J"), (7.0, "j")]
            turns += [(7.1, "X"), (7.2, "T"), (8.2, "P"), (8.4, "X")] if trains else [(8.5, "X")]
            changes += [[round(1e3 * at), slot, code] for at, code in turns]
        return [self._line("slots", start, names={}, changes=sorted(changes))]

    def _lengths(self, mean: float) -> dict[str, int]:
        found: dict[str, int] = {}
        for _ in range(SEQUENCES // 8):
            b = str(length_bin(min(16384.0, self.rng.lognormvariate(mean, 0.9))))
            found[b] = found.get(b, 0) + 8
        return dict(sorted(found.items(), key=lambda item: int(item[0])))

    def _decisions(self) -> list[dict[str, Any]]:
        lines = []
        for number in range(3 * self.num_steps):
            at = self.at(1 + number / 3)
            moved = [self.rng.randrange(self.num_slots) for _ in range(4)]
            gain, regret = self.rng.uniform(0, 3), self.rng.uniform(-0.5, 1)
            chosen = {"num_rollout": 1, "num_reward": 1, "value_s": 20.0, "gain_s": gain, "penalty_s": 0.1}
            lines.append(
                self._line(
                    "decision",
                    at,
                    number=number,
                    cause=self.text or "step admitted",
                    step=1 + number // 3,
                    reason="it gains",
                    moves={str(block): "reward" for block in moved},
                    blocks={"rollout": list(range(self.num_slots)), "reward": [], "train": []},
                    block_slots=1,
                    candidates=[chosen],
                    chosen=0,
                )
            )
            lines += [self._shift(at, block, number) for block in moved]
            worth = {"predicted_gain_s": gain, "measured_gain_s": gain - regret, "regret_s": regret}
            lines.append(self._line("worth", at + STEP_S, number=number, is_shift=True, **worth))
        return lines

    def _shift(self, at: float, block: int, decision: int) -> dict[str, Any]:
        took = {"down_s": {"all": 0.1}, "up_s": {"all": 0.2}, "took_s": 0.3, "aborted": 3, "failure": ""}
        kept = {"asleep_bytes": 1, "awake_bytes": 2, "slots": [f"node-{block // 8}:{block % 8}"]}
        begun = {"begun": at - BEGAN + CLOCK, "block": block, "old": "rollout", "new": "reward", "decision": decision}
        return self._line("shift", at + 0.3, **begun, **took, **kept)

    def _samples(self) -> list[dict[str, Any]]:
        return [
            {
                "step": step,
                "id": f"{step:06}-00001-{member:04}",
                "prompt": self.text or f"prompt of step {step}",
                "ground_truth": "42",
                "response": self.text or clipped(" ".join(self.rng.choices(WORDS, k=400))),
                "num_tokens": 400,
                "finish": "stop",
                "versions": [step - 1, step],
                "critique": self.text or clipped(" ".join(self.rng.choices(WORDS, k=400))),
                "num_critique_tokens": 300,
                "score": None if member == 3 else member / 2,
                "failure": "truncated" if member == 3 else "",
            }
            for step in range(1, self.num_steps + 1)
            for member in range(4)
        ]
