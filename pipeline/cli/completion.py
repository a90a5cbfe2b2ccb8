"""What a shell proposes: names of runs, configurations and keys; and the script that makes it ask."""

from collections.abc import Iterator

import click
from click.shell_completion import CompletionItem, get_completion_class

SHELLS = ("bash", "zsh", "fish")
_VARIABLE = "_PIVOT_PIPELINE_COMPLETE"


def script(shell: str, commands: click.Command) -> str:
    made = get_completion_class(shell)
    assert made is not None
    return made(commands, {}, "pivot-pipeline", _VARIABLE).source()


def runs(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names under ./runs; where none fits, folders."""
    from pipeline.cli.runs import all_runs

    names = [run.name for run in all_runs() if run.name.startswith(incomplete)]
    return [*map(CompletionItem, names)] or [CompletionItem(incomplete, type="dir")]


def configs(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Those that come with the package, and the keys that an override may have; where none fits, files."""
    from pipeline.config_paths import packaged_configs

    packaged = packaged_configs()
    names = sorted(str(path.relative_to(packaged)) for path in packaged.rglob("*.yaml"))
    found = [*names, *(_keys() if incomplete and "/" not in incomplete else ())]
    begun = [CompletionItem(name) for name in found if incomplete and name.startswith(incomplete)]
    return begun or [CompletionItem(incomplete, type="file")]


def _keys() -> Iterator[str]:
    from pipeline.config import Config
    from pipeline.config_errors import all_names, submodel

    for path in all_names(Config):
        field = Config.model_fields[path[0]]
        for key in path[1:]:
            section = submodel(field.annotation)
            if section is None:
                break
            field = section.model_fields[key]
        else:
            if submodel(field.annotation) is None:
                yield f"{'.'.join(path)}="
