"""`new`: a folder with a configuration to begin with, for the user's models, data and cluster."""

import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import click

from pipeline.config import load_files
from pipeline.config_paths import packaged_configs
from pipeline.core.errors import ConfigError
from pipeline.memory import has_gpus
from pipeline.new_config import TEMPLATE, Answers, Found, draft, explained
from pipeline.wording import visible

_CONFIG, _TEMPLATE = "run.yaml", "judge.jinja"
_USER_FAULT = 2
_CPU_SLOTS, _NODE_SLOTS = 3, 8


def new(folder: str, answers: Answers, num_slots: int | None) -> int:
    """Exit code 2 if what was written is not valid yet: then it is said what is missing. Raises ConfigError, and then
    has written nothing, where answers are missing, or there is such a file already."""
    from pipeline.checks import check_all
    from pipeline.cli.site import check_site

    place = Path(folder)
    config = place / _CONFIG
    if config.exists():
        raise ConfigError(f"{config} is there already: choose another folder, or change it")
    answers = _asked(answers) if sys.stdin.isatty() and sys.stdout.isatty() else _complete(answers)
    is_gpu = answers.cluster == "slurm" or has_gpus()
    answers = replace(
        answers,
        policy=_absolute(answers.policy),
        genrm=_absolute(answers.genrm),
        data=tuple(map(_absolute, answers.data)),
        val=tuple(map(_absolute, answers.val)),
        functions=tuple(map(_absolute_function, answers.functions)),
        template=_absolute(answers.template) if answers.template else _TEMPLATE,
        slots=num_slots or _slots(answers.cluster),
    )
    found = Found(
        has_gpus=is_gpu,
        policy_positions=_positions(answers.policy),
        judge_positions=_positions(answers.genrm),
        num_rows=_num_rows(answers),
    )
    text = explained(draft(answers, found), shlex.quote(str(config)))
    place.mkdir(parents=True, exist_ok=True)
    if answers.judges and answers.template == _TEMPLATE and not (place / _TEMPLATE).exists():
        (place / _TEMPLATE).write_text(TEMPLATE % answers.choices, encoding="utf-8")
    config.write_text(text, encoding="utf-8")
    click.echo(visible(f"written: {', '.join(str(path) for path in sorted(place.iterdir()) if path.is_file())}"))
    try:
        made = load_files([config])
        check_all(made)
        notes = check_site(made)
    except ConfigError as error:
        click.echo(visible(f"it is not valid yet:\n{error}"), err=True)
        click.echo(visible(f"once that is mended: pivot-pipeline validate {shlex.quote(str(config))}"), err=True)
        return _USER_FAULT
    for note in notes:
        click.echo(visible(f"not checked: {note}"))
    click.echo(visible(f"it is valid; start it: pivot-pipeline submit {shlex.quote(str(config))}"))
    return 0


def _complete(answers: Answers) -> Answers:
    missing = [
        *([] if answers.policy else ["--policy FOLDER"]),
        *([] if answers.data else ["--data FILE"]),
        *(
            []
            if answers.judges or answers.functions
            else ["--genrm FOLDER (or --judge-url URL, or --function FILE:NAME)"]
        ),
    ]
    if missing:
        raise ConfigError(f"say also {', '.join(missing)}; on a terminal it would be asked")
    return answers if answers.cluster else replace(answers, cluster="slurm" if answers.slurm else "local")


def _asked(answers: Answers) -> Answers:
    """Of what was not said, what cannot be guessed."""
    if not answers.policy:
        answers = replace(answers, policy=click.prompt("Folder of the policy's model"))
    if not answers.data:
        answers = replace(answers, data=tuple(click.prompt("File of prompts (jsonl or parquet)").split()))
    if not answers.judges and not answers.functions:
        judge = click.prompt("The judge: folder of a model, URL that ends with /v1, or a function's FILE.py:NAME")
        if judge.startswith(("http://", "https://")):
            answers = replace(answers, judge_url=judge, judge_model=click.prompt("The model's name there"))
        elif ".py:" in judge:
            answers = replace(answers, functions=(judge,))
        else:
            answers = replace(answers, genrm=judge)
    if answers.cluster:
        return answers
    answers = replace(answers, cluster=click.prompt("Where", type=click.Choice(["local", "slurm"]), default="local"))
    if answers.cluster == "slurm" and "partition" not in answers.slurm:
        partition = click.prompt("Partition (as sinfo lists them)", default="")
        answers = replace(answers, slurm={**answers.slurm, "partition": partition})
    return answers


def _absolute(text: str) -> str:
    """Of what is there; anything else is looked for beside the file, or among the packaged configs."""
    return str(path.absolute()) if text and "://" not in text and (path := Path(text).expanduser()).exists() else text


def _absolute_function(text: str) -> str:
    file, _, name = text.rpartition(":")
    return f"{_absolute(file)}:{name}" if file.endswith(".py") else text


def _slots(cluster: str) -> int:
    if cluster == "slurm":
        return _NODE_SLOTS
    devices = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    return len(devices) or _CPU_SLOTS


def _positions(model: str) -> int | None:
    from pipeline.checks import positions

    place = next((folder for folder in (Path(model), packaged_configs() / model) if model and folder.is_dir()), None)
    return positions(str(place)) if place else None


def _num_rows(answers: Answers) -> int | None:
    from pipeline.data_files import read_rows

    files = [next((str(f) for f in (Path(p), packaged_configs() / p) if f.is_file()), p) for p in answers.data]
    try:
        return sum(1 for file in files for _ in read_rows(file))
    except ConfigError:  # the check of what was written says so
        return None
