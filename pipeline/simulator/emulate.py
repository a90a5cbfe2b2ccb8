"""A simulated setup as the configuration of a live run on emulated engines, to hold one against the other.

Iterations, prefill, updates, shifts and training take here what the setup says, times `time_scale`, and a token here
stands for `grain` of the model's (pipeline.emulation). `comparable` is the setup without what a configuration cannot
say (responses to a prompt that resemble each other, prefixes that they share), and with what a live run does not scale.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.compose import dump
from pipeline.core.events import Role
from pipeline.core.feeding import MAX_BACKLOG_S
from pipeline.core.modes import ModeName
from pipeline.core.planner.settings import DEFAULT
from pipeline.emulation import EVEN, Unevenness
from pipeline.simulator.admission import Admission
from pipeline.simulator.cost import SLEEP_S
from pipeline.simulator.lengths import POLICY_16K, VERDICT_4K
from pipeline.simulator.modes import Schedule
from pipeline.simulator.setup import PAPER_GROUPS, Setup, paper_setup

Parts = Sequence[tuple[float, float, float]]
_KV_BYTES = 1024  # of a token here
_CHAT = len("[user: \nassistant: ")  # what the byte tokenizer puts around a message
_TEMPLATE = "{{ prompt }}|{{ response }}"


@dataclass(frozen=True, kw_only=True)
class Emulation:
    """`models`: known names of policy and judge. `lengths`, `verdicts`: the mixtures that its lengths are of."""

    setup: Setup
    gpu: str
    models: tuple[str, str]
    lengths: Parts
    verdicts: Parts
    time_scale: float = 1.0
    grain: int = 16
    uneven: Unevenness = EVEN

    @property
    def comparable(self) -> Setup:
        work = replace(self.setup.workload, correlation=0.0, shares_prefix=False)
        backlog_s = MAX_BACKLOG_S / self.time_scale
        return replace(self.setup, workload=work, max_prefill_backlog_s=backlog_s, flush_s=1.0)

    def write(self, folder: Path, schedule: Schedule, num_steps: int) -> Path:
        """The configuration of a run of the schedule, with its prompts beside it. Raises ValueError as `config`."""
        self.write_prompts(folder / "prompts.jsonl")
        path = folder / "config.yaml"
        path.write_text(dump(self.config(schedule, folder / "prompts.jsonl", num_steps)), encoding="utf-8")
        return path

    def write_prompts(self, path: Path, num: int = 512) -> None:
        """As long as the setup's."""
        length = max(4, round(self.setup.workload.prompt_tokens / self.grain) - _CHAT)
        with path.open("w") as file:
            for number in range(num):
                message = {"role": "user", "content": f"{number:0{length}}"}
                file.write(json.dumps({"data_source": "emulated", "prompt": [message]}) + "\n")

    def config(self, schedule: Schedule, prompts: Path, num_steps: int) -> dict[str, Any]:
        """The tree of a run of the schedule. Raises ValueError for what no run can do."""
        setup, work = self.setup, self.setup.workload
        if schedule.admission is Admission.BARRIER:
            raise ValueError(f"{schedule}: a run admits a step as soon as staleness allows it, or in pairs")
        per_node = min(setup.gpus_per_node, setup.num_gpus)
        return {
            "cluster": {"nodes": setup.num_gpus // per_node, "slots_per_node": per_node},
            "model": {which: {"path": "emulated", "dtype": "float32"} for which in ("policy", "genrm")},
            "data": {
                "train_files": str(prompts),
                "max_prompt_length": 2 * _CHAT + round(work.prompt_tokens / self.grain),
                "train_batch_size": work.num_prompts,
            },
            "rollout": {
                "n": work.num_each,
                "max_response_length": work.rollout.longest // self.grain,
                "engine": self._engine(Role.ROLLOUT),
            },
            "reward": {
                "genrm": {
                    "template": _TEMPLATE + "." * max(0, round(work.template_tokens / self.grain) - _CHAT - 1),
                    "max_tokens": work.verdict.longest // self.grain,
                    "timeout_s": 3600.0,
                    "temperature": 1.0,
                    "engine": self._engine(Role.REWARD),
                }
            },
            "algorithm": {"staleness": schedule.staleness},
            "trainer": self._trainer(schedule, num_steps),
            "placement": self._placement(schedule),
            "checkpoint": {"save_freq": max(1, num_steps), "keep": 1},
            "evaluate": {"freq": 0},
            "tracking": {"uri": "none"},
        }

    def _engine(self, role: Role) -> dict[str, Any]:
        setup, cost = self.setup, self.setup.role(role)
        is_judge = role is Role.REWARD
        timing = {
            "profile": f"{self.gpu}:{self.models[is_judge]}",
            "num_gpus": cost.num_gpus,
            "lengths": [list(part) for part in (self.verdicts if is_judge else self.lengths)],
            "kv_bytes_per_token": _KV_BYTES,
            "time_scale": self.time_scale,
            "grain": self.grain,
            "sleep_s": SLEEP_S * setup.shift_scale * self.time_scale,
            "wake_s": cost.wake_s * setup.shift_scale * self.time_scale,
            "update_s": 0.0 if is_judge else cost.update_s * self.time_scale,
            "uneven": self.uneven.model_dump(),
        }
        return {
            "name": "emulated",
            "kv_cache_bytes": max(1 << 20, int(cost.kv_tokens / self.grain) * _KV_BYTES),
            "max_num_seqs": setup.max_num_seqs,
            "enable_prefix_caching": False,
            "options": timing | ({"script": "judge"} if is_judge else {}),
        }

    def _trainer(self, schedule: Schedule, num_steps: int) -> dict[str, Any]:
        setup, num_gpus = self.setup, schedule.train
        return {
            "total_training_steps": num_steps,
            "lr": 1e-3,
            "strategy": "emulated",
            "ranks": num_gpus // setup.block,
            "options": {
                "profile": f"{self.gpu}:{self.models[0]}",
                "num_gpus": num_gpus,
                "time_scale": self.time_scale,
                "grain": self.grain,
                "sleep_s": setup.train.sleep_s(num_gpus) * setup.shift_scale * self.time_scale,
                "wake_s": setup.train.wake_s(num_gpus) * setup.shift_scale * self.time_scale,
                "uneven": self.uneven.model_dump(),
            },
        }

    def _placement(self, schedule: Schedule) -> dict[str, Any]:
        setup = self.setup
        own = schedule.mode is ModeName.DISAGGREGATED
        return {
            "mode": schedule.mode.value,
            "admission": schedule.judging.value,
            "roles": {
                "rollout": {
                    "slots": setup.rollout_gpus,
                    "replicas": schedule.rollout // setup.rollout_gpus if own else 1,
                },
                "reward": {
                    "slots": setup.reward_gpus,
                    "replicas": max(1, schedule.reward // setup.reward_gpus),
                },
                "train": {"slots": setup.block},
            },
            "planner": {
                "min_dwell_s": DEFAULT.min_dwell_s * self.time_scale,
                "tick_s": max(0.1, DEFAULT.tick_s * self.time_scale),
            },
        }


def paper_emulation(
    group: int,
    gpu: str,
    *,
    num_gpus: int,
    num_sequences: int,
    time_scale: float = 1.0,
    grain: int = 16,
    uneven: Unevenness = EVEN,
) -> Emulation:
    """Of one of the paper's groups (`paper_setup`)."""
    pair = PAPER_GROUPS[group]
    return Emulation(
        setup=paper_setup(group, gpu, num_gpus=num_gpus, num_sequences=num_sequences),
        gpu=gpu,
        models=(pair.policy, pair.judge),
        lengths=POLICY_16K,
        verdicts=VERDICT_4K,
        time_scale=time_scale,
        grain=grain,
        uneven=uneven,
    )
