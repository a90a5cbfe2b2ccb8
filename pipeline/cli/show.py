"""`status` and `cancel`, and how a run's state and end are shown."""

import json
import shlex
import signal
import sys
import time
from pathlib import Path

import click

from pipeline.cli.runs import (
    DEFAULT_ROOT,
    Status,
    all_runs,
    as_argument,
    find_run,
    how_it_stands,
    is_live,
    job_output,
    read_status,
    signal_controller,
)
from pipeline.cli.terminal import table
from pipeline.core.errors import ConfigError
from pipeline.run_folder import RunFolder, read_json
from pipeline.status import is_stopped
from pipeline.wording import number, seconds, visible

_POLL_S = 0.1


def status(name: str | None, as_json: bool) -> int:
    found = [find_run(name)] if name else all_runs()
    states = [read_status(run) for run in found]
    if as_json:
        click.echo(json.dumps(states[0] if name else states, indent=1))
    elif name:
        click.echo(describe(found[0], states[0]))
    elif not found:
        click.echo(f"no runs in {DEFAULT_ROOT.absolute()}")
    else:
        rows = [(r.name, how_it_stands(s), progress(s), _age(s)) for r, s in zip(found, states, strict=True)]
        click.echo(table([("RUN", "STATUS", "STEP", "UPDATED"), *rows], indent=""))
    return 0


def describe(run: RunFolder, status: Status) -> str:
    """Some lines about a run, whatever its state."""
    rows = [
        ("status", how_it_stands(status)),
        ("step", progress(status)),
        ("stage", status.get("stage") or "-"),
        ("attempt", str(status["attempt"])),
        ("updated", _age(status)),
        ("folder", str(run.path)),
        ("MLflow", how_mlflow_stands(status)),
    ]
    if status.get("job"):
        from pipeline.cli.job import describe_job

        rows.insert(1, ("job", describe_job(status["job"])))
    for sink in status.get("sinks") or ():
        reached = f"has step {sink['last_step']}" if sink["last_step"] >= 0 else "has no step yet"
        rows.append(("also to", f"{sink['path']}: {sink['trouble'] or reached}"))
    nodes = status.get("nodes") or {}
    if status["live"] and (len(nodes) > 1 or set(nodes.values()) - {"ready"}):
        rows.append(("nodes", ", ".join(f"{node} {state}" for node, state in nodes.items())))
    rows += [
        (worker["name"], f"{worker['state']} on {worker['node']}, slots {', '.join(map(str, worker.get('slots', ())))}")
        for worker in status.get("workers") or ()
        if status["live"]
    ]
    lines = [visible(run.name), table(rows), *judge_news(status)]
    if how_it_stands(status) == "died":
        lines.append("  the controller was killed and could not say why")
        if run.job.exists():
            lines.append(visible(f"  last lines of its job's output:\n{job_output(run)}"))
    if error := describe_error(status):
        lines.append(error)
    if how_it_stands(status) in ("died", "failed", "cancelled"):
        lines.append(f"  go on: pivot-pipeline resume {as_argument(run)}")
    return "\n".join(lines)


def judge_news(status: Status | None) -> list[str]:
    """A judge that failed on most of what it was asked first, with two of its answers."""
    judge = (status or {}).get("judge")
    if not judge:
        return []
    from pipeline.report.judge import describe

    return [visible(line) for line in describe(judge)]


def describe_error(status: Status) -> str:
    """The first cause of a failure, with its role, node and log tail where they are known."""
    error = status.get("error")
    if not error:
        return ""
    place = " on ".join(str(error[key]) for key in ("role", "node") if error.get(key))
    text = f"cause{f' ({place})' if place else ''}: {error['reason']}"
    if error.get("log_tail"):
        text += f"\nlast lines of its log:\n{error['log_tail']}"
    return visible(text)


def describe_end(run: RunFolder, status: Status) -> str:
    """The summary of an attempt that is over."""
    summary = read_json(run.summary) or {}
    wall = f" in {seconds(summary['wall_s'])}" if "wall_s" in summary else ""
    steps = f"{summary.get('steps', 0)} of {status['total_steps']} steps"
    lines = [f"{visible(run.name)}: {how_it_stands(status)}, {steps}{wall}"]
    rows = []
    if summary:
        spent = sorted((summary.get("stage_seconds") or {}).items(), key=lambda item: -item[1])
        total = sum(value for _, value in spent) or 1.0
        change = "{} ▶ {}"
        rows = [
            ("reward", change.format(number(summary["reward_first"]), number(summary["reward_last"]))),
            ("held-out accuracy", change.format(number(summary["eval_first"]), number(summary["eval_last"]))),
            ("judge's false positives", number(summary["judge_false_positive_rate"])),
            ("tokens/s", number(summary["tokens_per_s"], ",.0f")),
            ("sequences", f"{summary['sequences_trained']} trained, {summary['sequences_dropped']} dropped"),
            ("time", ", ".join(f"{name} {seconds(value)} ({value / total:.0%})" for name, value in spent) or "-"),
        ]
    lines.append(table([*rows, ("run folder", str(run.path)), ("MLflow", how_to_open_mlflow(status))]))
    if error := describe_error(status):
        lines.append(error)
    if how_it_stands(status) != "done":
        lines.append(f"logs: pivot-pipeline logs {as_argument(run)}")
        lines.append(f"go on: pivot-pipeline resume {as_argument(run)}")
    return "\n".join(lines)


def how_mlflow_stands(status: Status) -> str:
    """What of the run is not in MLflow yet, and what that waits for."""
    mlflow = status.get("mlflow")
    if not mlflow:
        return "not used" if status["status"] not in ("new", "starting") else "not opened yet"
    steps, points = mlflow["unsent_steps"], mlflow["unsent_points"]
    if not mlflow["trouble"] and not steps:
        return "everything was sent"
    why = f": {mlflow['trouble']}" if mlflow["trouble"] else ""
    return visible(f"{points} points, {steps} steps among them, wait to be sent{why}")


def how_to_open_mlflow(status: Status) -> str:
    mlflow = status.get("mlflow") or {}
    uri = mlflow.get("uri", "")
    if not mlflow:
        return "not used"
    if unsent := mlflow["unsent_steps"]:
        return f"{uri} did not answer: {unsent} steps did not get there, they stand in metrics.jsonl"
    if uri.startswith(("http://", "https://")):
        return str(uri)
    command = Path(sys.executable).with_name("mlflow")
    return f"{shlex.quote(str(command))} ui --backend-store-uri {shlex.quote(uri)}"


def cancel(name: str) -> int:
    run = find_run(name)
    run.check_own()
    status = read_status(run)
    if status.get("job"):
        return _cancel_job(run, status)
    if not signal_controller(status, signal.SIGINT):
        raise ConfigError(f"{run.name} is not running: {how_it_stands(status)}")
    click.echo(f"stopping {run.name}; Ctrl-C stops it at once")
    try:
        _wait_for_end(status)
    except KeyboardInterrupt:
        signal_controller(status, signal.SIGINT)
        _wait_for_end(status)
    click.echo(f"{run.name}: {how_it_stands(read_status(run))}")
    return 0


def _cancel_job(run: RunFolder, status: Status) -> int:
    from pipeline.cli.job import cancel_job

    if not status["live"]:
        raise ConfigError(f"{run.name} is not running: {how_it_stands(status)}")
    click.echo(f"stopping {run.name}")
    cancel_job(run, status)
    click.echo(f"{run.name}: cancelled")
    return 0


def describe_stopped(pid: int) -> str:
    return f"the controller, process {pid}, is stopped: kill -CONT {pid} lets it go on, kill -KILL {pid} ends the run"


def _wait_for_end(status: Status) -> None:
    """Waits for the controller's end; its own limits bound that, Ctrl-C unblocks it. Says so, once, if the controller
    is stopped: then it cannot obey."""
    is_told = False
    while is_live(status):
        if not is_told and is_stopped(status["pid"]):
            is_told = True
            click.echo(describe_stopped(status["pid"]))
        time.sleep(_POLL_S)


def progress(status: Status) -> str:
    return f"{status.get('step', 0)} of {status.get('total_steps', '?')}"


def _age(status: Status) -> str:
    return f"{seconds(max(0.0, time.time() - status['updated']))} ago" if "updated" in status else "-"
