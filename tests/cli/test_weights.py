"""`gps`: what a run says of its weights, live and after its end."""

import json
import os
from pathlib import Path

import yaml

from pipeline.run_folder import RunFolder, write_json
from pipeline.status import start_ticks
from tests.cli.conftest import Pivot

WEIGHTS = {
    "bytes": {"policy, two versions": 31_200_000_000, "genrm": 2_000_000},
    "nodes": {
        "n0": {"visible": 7, "holds": [6, 7], "copying": None},
        "n1": {"visible": None, "holds": [], "copying": {"version": 7, "source": "n0"}},
    },
    "readers": {"rollout-0": {"node": "n0", "version": 6}, "rollout-1": {"node": "n0", "version": 7}},
    "copies": [{"version": 6, "source": "n0", "node": "n1", "num_bytes": 15_600_000_000, "seconds": 1.3}],
}


def a_run(path: Path, weights: object, **changes: object) -> RunFolder:
    run = RunFolder(path)
    run.path.mkdir(parents=True)
    run.config.write_text(yaml.safe_dump({}))
    status = {"run": path.name, "status": "running", "attempt": 1, "pid": os.getpid(), "version": 7}
    write_json(run.status, status | {"pid_start": start_ticks(os.getpid()), "weights": weights} | changes)
    return run


def test_it_shows_holders_readers_and_copies(pivot: Pivot, tmp_path: Path) -> None:
    a_run(tmp_path / "live", WEIGHTS)
    done = pivot("gps", "live")
    assert done.code == 0
    lines = [line.split() for line in done.out.splitlines()]
    assert done.out.splitlines()[0] == "live: version 7"
    assert "31.2 GB for policy, two versions, 2 MB for genrm, on each node" in done.out
    assert ["n0", "7", "6,", "7", "rollout-0", "(6),", "rollout-1", "(7)", "-"] in lines
    assert ["n1", "-", "-", "-", "7", "from", "n0"] in lines
    assert ["6", "n0", "n1", "15.6", "GB", "1.3", "s", "12", "GB/s"] in lines
    assert json.loads(pivot("gps", "live", "--json").out) == WEIGHTS


def test_where_weights_are_dealt_it_shows_who_has_what_and_reads_from_others(pivot: Pivot, tmp_path: Path) -> None:
    nodes = {f"n{i}": {"visible": 7, "piles": [i], "holds": [7], "copying": None} for i in range(2)}
    a_run(tmp_path / "dealt", WEIGHTS | {"nodes": nodes, "copies": [], "reads": WEIGHTS["copies"]})
    done = pivot("gps", "dealt")
    lines = [line.split() for line in done.out.splitlines()]
    assert ["NODE", "PILES", "VISIBLE", "HOLDS", "READERS", "COPIES"] in lines
    assert ["n1", "1", "7", "7", "-", "-"] in lines
    assert "last copies" not in done.out and "last reads from other nodes" in done.out


def test_of_a_run_that_is_over_it_shows_the_end(pivot: Pivot, tmp_path: Path) -> None:
    a_run(tmp_path / "over", WEIGHTS | {"copies": []}, status="done", pid=0)
    done = pivot("gps", "over")
    assert done.code == 0 and "(done: as it was at the end)" in done.out and "last copies" not in done.out


def test_a_run_that_has_not_begun_says_so(pivot: Pivot, tmp_path: Path) -> None:
    a_run(tmp_path / "new", None, status="starting")
    done = pivot("gps", "new")
    assert (done.code, done.out) == (2, "") and "run new has not said anything of its weights: starting" in done.err
