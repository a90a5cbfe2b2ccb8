"""`gps`: the weights of a run in its nodes' shared memory."""

import json
from typing import Any

import click

from pipeline.cli.runs import find_run, how_it_stands, read_status
from pipeline.cli.terminal import table
from pipeline.core.errors import ConfigError
from pipeline.wording import seconds, visible


def gps(name: str, as_json: bool) -> int:
    run = find_run(name)
    status = read_status(run)
    weights = status.get("weights")
    if weights is None:
        raise ConfigError(f"run {visible(run.name)} has not said anything of its weights: {how_it_stands(status)}")
    if as_json:
        click.echo(json.dumps(weights, indent=1))
    else:
        state = "" if status["live"] else f" ({how_it_stands(status)}: as it was at the end)"
        click.echo(f"{visible(run.name)}: version {status['version']}{state}\n{describe(weights)}")
    return 0


def describe(weights: dict[str, Any]) -> str:
    parts = [", ".join(f"{_size(size)} for {store}" for store, size in weights["bytes"].items()) + ", on each node"]
    rows: list[tuple[str, ...]]
    if weights["nodes"]:
        is_dealt = any(said.get("piles", [0]) != [0] for said in weights["nodes"].values())
        rows = [("NODE", "PILES", "VISIBLE", "HOLDS", "READERS", "COPIES")]
        rows += [_of_node(node, said, weights) for node, said in weights["nodes"].items()]
        rows = rows if is_dealt else [(node, *rest) for node, _, *rest in rows]
        parts.append(table(rows, indent=""))
    for key, title in (("copies", "last copies between nodes"), ("reads", "last reads from other nodes")):
        if made := weights.get(key):
            rows = [("VERSION", "FROM", "TO", "BYTES", "TOOK", "SPEED"), *map(_of_made, made)]
            parts.append(f"{title}\n{table(rows, indent='')}")
    return "\n\n".join(parts)


def _of_made(made: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(made["version"]),
        made["source"],
        made["node"],
        _size(made["num_bytes"]),
        seconds(made["seconds"]),
        f"{made['num_bytes'] / 1e9 / max(made['seconds'], 1e-9):.2g} GB/s",
    )


def _of_node(node: str, said: dict[str, Any], weights: dict[str, Any]) -> tuple[str, ...]:
    readers = [f"{name} ({reader['version']})" for name, reader in weights["readers"].items() if reader["node"] == node]
    copying = said["copying"]
    return (
        node,
        ", ".join(map(str, said.get("piles", ()))),
        "-" if said["visible"] is None else str(said["visible"]),
        ", ".join(map(str, said["holds"])) or "-",
        ", ".join(readers) or "-",
        f"{copying['version']} from {copying['source']}" if copying else "-",
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3g} MB"
