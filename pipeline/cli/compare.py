"""`compare`: the modes of placement on the same data and seeds, run one after the other; or runs that are there."""

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from pipeline.cli.page_file import check_page
from pipeline.cli.plan import load_arguments
from pipeline.cli.runs import Rows, find_run, how_it_stands, read_status
from pipeline.cli.terminal import table
from pipeline.comparison import IDLE, Outcome, mean_of, outcome
from pipeline.config import Config, load_resolved
from pipeline.core.errors import ConfigError, RunError
from pipeline.core.modes import ModeName
from pipeline.run_folder import RunFolder
from pipeline.wording import visible

Found = dict[str, list[tuple[RunFolder, Outcome]]]


def compare(
    arguments: Sequence[str], *, modes: str, num_seeds: int, cluster: str | None, folder: str, html: str, as_json: bool
) -> int:
    """CONFIG arguments, or the names of runs."""
    if html:
        check_page(Path(html), "--html", "compared.html")
    failed: dict[str, str] = {}
    are_runs = not any("=" in text or Path(text).suffix in (".yaml", ".yml") for text in arguments)
    if are_runs:
        found = _of_runs(arguments)
    else:
        found, failed = _of_modes(arguments, modes, num_seeds, cluster, folder)
    means = {name: mean_of([one for _, one in runs]) for name, runs in found.items()}
    if as_json:
        click.echo(json.dumps([_as_json(name, found[name], mean) for name, mean in means.items()]))
    else:
        _print(means, {name: len(runs) for name, runs in found.items()})
    if html:
        _write(Path(html), " and ".join(arguments if are_runs else [Path(arguments[0]).stem]), found, means)
        click.echo(f"page: {html}", err=as_json)
    for name, why in failed.items():
        click.echo(visible(f"{name}: {why}"), err=True)
    return 1 if failed else 0


def _write(path: Path, title: str, found: Found, means: Mapping[str, Outcome]) -> None:
    from pipeline.report.comparison import comparison_page

    rows = {name: [Rows(run).new() for run, _ in runs] for name, runs in found.items()}
    try:
        path.write_text(comparison_page(f"{title}, compared", rows, means), encoding="utf-8")
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror}") from error


def _of_runs(names: Sequence[str]) -> Found:
    if len(names) < 2:
        raise ConfigError(f"{names[0]}: one run is nothing to compare; name two, or a configuration (*.yaml)")
    runs = {name: find_run(name) for name in dict.fromkeys(names)}
    return {name: [(run, _outcome(run))] for name, run in runs.items()}


def _of_modes(
    arguments: Sequence[str], modes: str, num_seeds: int, cluster: str | None, folder: str
) -> tuple[Found, dict[str, str]]:
    """Runs that are done in `folder` are not run again, others go on."""
    names = list(ModeName) if modes == "all" else [_mode(text.strip()) for text in modes.split(",")]
    failed: dict[str, str] = {}
    configs: dict[ModeName, Config] = {}
    for mode in dict.fromkeys(names):
        try:
            configs[mode] = load_arguments([*arguments, *_settings(mode)])
        except ConfigError as error:  # the mode does not fit the configuration, or nothing does
            failed[mode.value] = str(error)
    found: Found = {}
    for mode, config in configs.items():
        root = Path(folder or Path(config.run.root) / f"{Path(arguments[0]).stem}-compare").absolute()
        for seed in range(config.run.seed, config.run.seed + num_seeds):
            run = RunFolder(root / f"{mode.value}-seed{seed}")
            click.echo(f"{mode.value}, seed {seed}: {run.path}", err=True)
            if why := _run(run, [*arguments, *_settings(mode), f"run.seed={seed}"], cluster):
                failed[f"{mode.value}, seed {seed}"] = why
            else:
                found.setdefault(mode.value, []).append((run, _outcome(run)))
    if not found:
        raise ConfigError("no run came to its end: " + "; ".join(f"{name}: {why}" for name, why in failed.items()))
    return found, failed


def _settings(mode: ModeName) -> list[str]:
    """What differs between the modes. The synchronous one has no staleness."""
    synchronous = ["algorithm.staleness=0"] if mode is ModeName.COLOCATED else []
    return [f"placement.mode={mode.value}", *synchronous]


def _run(run: RunFolder, arguments: Sequence[str], cluster: str | None) -> str:
    """To its end. "" if it is done, else how it stands."""
    from pipeline.cli.resume import resume
    from pipeline.cli.submit import submit

    with contextlib.redirect_stdout(sys.stderr):  # what runs say of themselves is not what is asked for
        if not run.config.exists():
            submit(
                tuple(arguments),
                cluster=cluster,
                run_dir=str(run.path),
                name=None,
                wait=True,
                dry_run=False,
                in_allocation=False,
            )
        elif how_it_stands(read_status(run)) != "done":
            resume(str(run.path), [], None, cluster=cluster, wait=True)
    stands = how_it_stands(read_status(run))
    return "" if stands == "done" else f"{stands} ({run.path})"


def _outcome(run: RunFolder) -> Outcome:
    rows = Rows(run).new()
    if not any(row["step"] for row in rows):
        raise ConfigError(f"{run.path}: no step is recorded yet")
    return outcome(rows, load_resolved(run.config))


def _print(means: Mapping[str, Outcome], num_runs: Mapping[str, int]) -> None:
    best = max((mean.sequences_per_s or 0.0 for mean in means.values()), default=0.0)
    header = (
        "",
        "RUNS",
        "SEQUENCES/S",
        "OF BEST",
        "TOKENS/S",
        "STEP",
        "IDLE",
        "IN",
        "SHIFTS/STEP",
        "REWARD",
        "ACCURACY",
    )
    click.echo(table([header, *(_line(name, num_runs[name], mean, best) for name, mean in means.items())], indent=""))
    click.echo(
        "\nidle: share of the time of all slots, in: rollout/reward/train slots/shifts   step: from one version to the "
        "next"
    )


def _line(name: str, num: int, mean: Outcome, best: float) -> tuple[str, ...]:
    speed = mean.sequences_per_s
    return (
        visible(name),
        str(num),
        _text(speed, ".3g"),
        _text(speed / best if speed and best else None, ".0%"),
        _text(mean.tokens_per_s, ",.0f"),
        "-" if mean.step_s is None else f"{mean.step_s:.3g} s",
        _text(sum(mean.idle.values()) if mean.idle else None, ".0%"),
        "/".join(f"{100 * mean.idle.get(state, 0.0):.0f}" for state in IDLE) if mean.idle else "-",
        f"{mean.shifts_per_step:.1f}",
        _text(mean.reward, ".3f"),
        _text(mean.accuracy, ".1%"),
    )


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _as_json(name: str, runs: Sequence[tuple[RunFolder, Outcome]], mean: Outcome) -> dict[str, object]:
    each = [{"run": str(run.path), **one.as_json()} for run, one in runs]
    return {"name": name, "mean": mean.as_json(), "runs": each}


def _mode(text: str) -> ModeName:
    if text not in list(ModeName):
        raise ConfigError(f"--modes {text!r}; valid: all, or some of {', '.join(ModeName)}")
    return ModeName(text)
