"""A configuration to begin with, made of a few answers: chosen so that it is valid, and explained key by key. Pure."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from pipeline.compose import Tree, dump_flat
from pipeline.config import Config
from pipeline.config_errors import submodel
from pipeline.core.errors import ConfigError

_EMULATED = "emulated"
_WIDTH, _LINE = 120, 110
_POSITIONS = 4096
"""Of a model that does not say."""
_MOST_PROMPT, _MOST_RESPONSE, _MOST_VERDICT = 1024, 2048, 1024
_CACHE_BYTES = {True: 8 << 30, False: 256 << 20}
"""By whether there are GPUs."""
_BATCH, _EVALUATED = 16, 256
_SHARED = 3
"""From so many slots on, they change roles while a step runs; fewer are used by one role after the other."""
_GUIDES = {
    "run": "quickstart.md",
    "cluster": "slurm.md",
    "model": "models.md",
    "data": "data.md",
    "rollout": "rollouts.md",
    "reward": "judges.md, docs/guides/rewards.md",
    "algorithm": "staleness.md",
    "trainer": "nodes.md",
    "placement": "placement.md",
    "checkpoint": "resume.md",
    "evaluate": "quickstart.md",
    "tracking": "tracking.md",
    "limits": "faults.md",
}
TEMPLATE = """Here is a task and an answer to it.

Task:
{{ prompt }}

Answer:
{{ response }}

Is the answer right? Think about it step by step. Then end with one line, either "Verdict: %s" or "Verdict: %s".
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Of the user. Texts that are empty: there is none. `choices`: the judge's words, the first for what is right."""

    policy: str
    data: tuple[str, ...]
    genrm: str = ""
    judge_url: str = ""
    judge_model: str = ""
    functions: tuple[str, ...] = ()
    val: tuple[str, ...] = ()
    prompt_key: str = "prompt"
    template: str = "judge.jinja"
    choices: tuple[str, str] = ("yes", "no")
    cluster: str = "local"
    nodes: int = 1
    slots: int = 3
    slurm: Mapping[str, str] = field(default_factory=dict)
    steps: int = 100

    @property
    def judges(self) -> bool:
        return bool(self.genrm or self.judge_url)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Of the machine, the models and the data; None: not known."""

    has_gpus: bool
    policy_positions: int | None = None
    judge_positions: int | None = None
    num_rows: int | None = None


def answers_of(*, choices: str, partition: str, account: str, time: str, **said: Any) -> Answers:
    """What the options of the command line say."""
    right, comma, wrong = (part.strip() for part in choices.partition(","))
    if not (right and comma and wrong) or "," in wrong:
        raise ConfigError(
            f"--choices {choices!r}: valid are two words, the one for what is right first, such as yes,no"
        )
    slurm = {name: value for name, value in (("partition", partition), ("account", account), ("time", time)) if value}
    return Answers(choices=(right, wrong), slurm=slurm, **said)


def draft(answers: Answers, found: Found) -> Tree:
    """The tree, with nothing in it that is better left to its default."""
    positions = found.policy_positions or _POSITIONS
    prompt = min(_MOST_PROMPT, positions // 4)
    models = {"policy": _model(answers.policy, found.has_gpus)}
    if answers.genrm:
        models["genrm"] = _model(answers.genrm, found.has_gpus)
    is_evaluated = bool(answers.val and answers.functions)
    tree: Tree = {
        "run": {"seed": 1, "root": "runs"},
        "cluster": {"kind": answers.cluster, "nodes": answers.nodes, "slots_per_node": answers.slots},
        "model": models,
        "data": {
            "train_files": list(answers.data),
            **({"val_files": list(answers.val)} if answers.val else {}),
            "prompt_key": answers.prompt_key,
            "max_prompt_length": prompt,
            "train_batch_size": min(_BATCH, found.num_rows or _BATCH),
        },
        "rollout": {
            "n": 8,
            "temperature": 1.0,
            "max_response_length": min(_MOST_RESPONSE, positions - prompt),
            "engine": _engine(answers.policy, found.has_gpus),
        },
        "reward": _reward(answers, found),
        "algorithm": {"staleness": 0, "kl": {"coef": 0.0}},
        "trainer": {"total_training_steps": answers.steps, "updates_per_step": 1, "lr": 1e-6},
        "placement": {"mode": _mode(answers)},
        "checkpoint": {"save_freq": 10, "keep": 2},
        "evaluate": {
            "freq": 10 if is_evaluated else 0,
            "num_prompts": _EVALUATED,
            **({"function": answers.functions[0]} if is_evaluated else {}),
        },
        "tracking": {"uri": "", "experiment": "pivot-pipeline"},
    }
    if answers.cluster == "slurm":
        tree["cluster"]["slurm"] = {"partition": "", "account": "", "time": "", "gres": "gpu", **answers.slurm}
    if found.has_gpus:
        tree["limits"] = {"engine_start_s": 900.0}
    if answers.policy == _EMULATED:
        tree["trainer"]["strategy"] = "emulated"
    return tree


def _model(path: str, has_gpus: bool) -> Tree:
    return {"path": path, "dtype": "bfloat16" if has_gpus and path != _EMULATED else "float32"}


def _engine(model: str, has_gpus: bool) -> Tree:
    return {"name": "emulated"} if model == _EMULATED else {"kv_cache_bytes": _CACHE_BYTES[has_gpus]}


def _reward(answers: Answers, found: Found) -> Tree:
    reward: Tree = {}
    if answers.judges:
        right, wrong = answers.choices
        reward["genrm"] = {
            "template": answers.template,
            "max_tokens": min(_MOST_VERDICT, (found.judge_positions or _POSITIONS) // 4),
            "temperature": 0.0,
            "verdict": {"kind": "choice", "marker": "Verdict:", "choices": {right: 1.0, wrong: 0.0}},
        }
        if answers.judge_url:
            reward["genrm"]["endpoint"] = {"url": answers.judge_url, "model": answers.judge_model}
        else:
            reward["genrm"]["engine"] = _engine(answers.genrm, found.has_gpus)
            if answers.genrm == _EMULATED:
                reward["genrm"]["engine"]["options"] = {"script": "judge"}
    if answers.functions:
        names = [path.rpartition(":")[2] for path in answers.functions]
        reward["functions"] = {name: {"path": path} for name, path in zip(names, answers.functions, strict=True)}
        reward["weights"] = dict.fromkeys([*(["genrm"] if answers.judges else []), *names], 1.0)
    return reward


def _mode(answers: Answers) -> str:
    num = answers.nodes * answers.slots
    if num < _SHARED:
        return "colocated"
    return "shiftable" if answers.genrm else "trainer_pool"


def explained(tree: Tree, name: str) -> str:
    """The tree as YAML, each key with what it is. `name`: the file's."""
    head = [
        f"# Check it:  pivot-pipeline validate {name}",
        f"# Start it:  pivot-pipeline submit {name}",
        "# Keys that are not here have their defaults.",
    ]
    parts = []
    for key, value in tree.items():
        section = submodel(Config.model_fields[key].annotation)
        assert section is not None
        parts.append("\n".join([f"{key}:  # docs/guides/{_GUIDES[key]}", *_of_section(value, section, "  ")]))
    return "\n\n".join(["\n".join(head), *parts]) + "\n"


def _of_section(tree: Tree, model: type[BaseModel], pad: str) -> Iterator[str]:
    for key, value in tree.items():
        field = model.model_fields[key]
        section = submodel(field.annotation)
        text, comment = dump_flat(value), f"# {_brief(field.description or '')}" if field.description else ""
        if section is not None and isinstance(value, dict):
            yield f"{pad}{key}:{f'  {comment}' if comment else ''}"
            yield from _of_section(value, section, f"{pad}  ")
        elif len(line := f"{pad}{key}: {text}") + len(comment) + 2 <= _WIDTH:
            yield f"{line}  {comment}".rstrip()
        else:
            yield f"{pad}{comment}"
            yield line


def _brief(text: str) -> str:
    """One line of it: whole, or as much as ends with a stop."""
    if len(text) <= _LINE:
        return text
    ends = [found.start() for found in re.finditer(r"[;.:] ", text) if found.start() <= _LINE]
    return text[: ends[-1]] if ends else f"{text[:_LINE].rpartition(' ')[0]} ..."
