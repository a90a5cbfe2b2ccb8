"""What every benchmark shares: `--json`, `--check`, raw samples on disk, one table of must-figures.

A benchmark measures raw samples, writes them to `benchmarks/out/<name>.json`, computes its figures from them, and
with `--check` exits 1 naming each figure that misses its bound. Bounds stand in the script's own MUST table.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OUT = Path(__file__).parent / "out"
# Scripts import from the checkout, and from this folder last: queue.py has the name of a standard module.
_others = [path for path in sys.path if Path(path).resolve() != OUT.parent]
sys.path[:] = [str(OUT.parents[1]), *_others, str(OUT.parent)]


@dataclass(frozen=True)
class Must:
    """A figure's bound: `at_least` or `at_most` (or both)."""

    at_least: float | None = None
    at_most: float | None = None

    def misses(self, value: float | None) -> str:
        """Why the value misses the bound; "" if it does not."""
        if value is None:
            return "was not measured"
        if self.at_least is not None and value < self.at_least:
            return f"is {value:.4g}, must be at least {self.at_least:g}"
        if self.at_most is not None and value > self.at_most:
            return f"is {value:.4g}, must be at most {self.at_most:g}"
        return ""


def parser(doc: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", action="store_true", help="print one JSON object with all figures")
    made.add_argument("--check", action="store_true", help="exit 1 if a must-figure is missed")
    made.add_argument("--from-raw", type=Path, help="compute the figures from raw samples measured before")
    return made


def main(
    name: str,
    args: argparse.Namespace,
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    figures: Callable[[dict[str, Any]], dict[str, float | None]],
    must: Mapping[str, Must],
) -> int:
    """Measure (or read raw samples), compute, print, check."""
    if args.from_raw:
        raw = json.loads(args.from_raw.read_text())
    else:
        raw = {"machine": machine(), "date": time.strftime("%Y-%m-%d"), **measure(args)}
        OUT.mkdir(exist_ok=True)
        (OUT / f"{name}.json").write_text(json.dumps(raw, indent=1))
    found = figures(raw)
    if args.json:
        print(json.dumps({"benchmark": name, "machine": raw["machine"], "date": raw["date"], "figures": found}))
    else:
        for key, value in found.items():
            print(f"{key:44} {'-' if value is None else f'{value:.4g}'}")
    missed = {key: why for key, bound in must.items() if (why := bound.misses(found.get(key)))} if args.check else {}
    for key, why in missed.items():
        print(f"{name}: {key} {why}", file=sys.stderr)
    return 1 if missed else 0


def kept(name: str, part: str, measure: Callable[[], Any]) -> Any:
    """What was measured before under this name, in benchmarks/out/<name>-parts/; otherwise it is measured now."""
    path = OUT / f"{name}-parts" / f"{part}.json"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_suffix(".part")
        written.write_text(json.dumps(measure()))
        written.rename(path)
        print(f"{name}: measured {part}", file=sys.stderr, flush=True)
    return json.loads(path.read_text())


def mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def machine() -> str:
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}"
    )


def percentile(samples: list[float], q: float) -> float:
    """Nearest rank."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, round(q * (len(ordered) - 1)))]
