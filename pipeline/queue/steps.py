"""The durable life of a step: its batch is recorded, trained, its metric row kept; and what is left after a crash."""

import json
from collections.abc import Sequence
from typing import Any

from pipeline.queue.index import Index
from pipeline.queue.schema import State
from pipeline.queue.sequences import require_state


def commit_batch(
    index: Index, step: int, ids: Sequence[str], dropped: Sequence[tuple[str, str]], parts: dict[str, Any]
) -> None:
    """Record the batch of `step` in this order: `ids` SCORED ▶ BATCHED, `dropped` (id, reason) ▶ DROPPED.

    Together they must be all sequences of the step, each once. `parts` is kept with the batch: it cannot be measured
    again. A batch recorded before must be the same. Raises ValueError, and then changes nothing.
    """
    states = _states(index, step)
    reasons = dict(dropped)
    given = [*ids, *(id for id, _ in dropped)]
    if len(set(given)) < len(given) or set(given) != set(states):
        missing, foreign = sorted(set(states) - set(given)), sorted(set(given) - set(states))
        raise ValueError(
            f"step {step} has {len(states)} sequences, its batch names {len(ids)} and {len(dropped)} dropped"
            f" (missing {missing[:3]}, not of this step {foreign[:3]}, twice {len(given) - len(set(given))})"
        )
    if recorded := index.fetch("SELECT ids FROM batch WHERE step = ?", step):
        if json.loads(recorded[0][0]) != list(ids):
            raise ValueError(f"step {step}: another batch is recorded already")
        return
    for id in ids:
        require_state(f"{id} (batch of step {step})", states[id], State.SCORED)
    index.write(
        "INSERT INTO batch(step, ids, state, parts) VALUES (?, ?, ?, ?)",
        *(step, json.dumps(list(ids)), State.BATCHED, json.dumps(parts)),
    )
    index.write_each("UPDATE seq SET state = ? WHERE id = ?", [(State.BATCHED, id) for id in ids])
    index.write_each(
        "UPDATE seq SET state = ?, reason = ? WHERE id = ?",
        [(State.DROPPED, reason, id) for id, reason in reasons.items()],
    )


def commit_trained(index: Index, step: int) -> tuple[int, int]:
    """The recorded batch of `step` is trained; returns how many sequences were trained and dropped."""
    batch_ids(index, step)
    index.write("UPDATE seq SET state = ? WHERE step = ? AND state = ?", State.TRAINED, step, State.BATCHED)
    index.write("UPDATE batch SET state = ? WHERE step = ?", State.TRAINED, step)
    states = list(_states(index, step).values())
    num_trained, num_dropped = states.count(State.TRAINED), states.count(State.DROPPED)
    if num_trained + num_dropped != len(states):
        raise ValueError(f"step {step}: {num_trained} trained + {num_dropped} dropped are not {len(states)} submitted")
    return num_trained, num_dropped


def batch_ids(index: Index, step: int) -> list[str]:
    """The recorded batch of `step`, in its order. Raises ValueError if there is none."""
    recorded = index.fetch("SELECT ids FROM batch WHERE step = ?", step)
    if not recorded:
        raise ValueError(f"step {step} has no recorded batch")
    ids: list[str] = json.loads(recorded[0][0])
    return ids


def batch_parts(index: Index, above: int) -> list[tuple[int, dict[str, Any]]]:
    """What was kept with the recorded batches of all steps > `above`, ascending."""
    rows = index.fetch("SELECT step, parts FROM batch WHERE step > ? ORDER BY step", above)
    return [(step, json.loads(parts)) for step, parts in rows]


def record_step(index: Index, step: int, row: dict[str, Any]) -> bool:
    """Keep the metric row of `step`; False if there was one already, which stays."""
    if index.fetch("SELECT 1 FROM step WHERE step = ?", step):
        return False
    index.write("INSERT INTO step(step, row) VALUES (?, ?)", step, json.dumps(row))
    return True


def step_rows(index: Index, above: int) -> list[tuple[int, dict[str, Any]]]:
    """The metric rows of all steps > `above`, ascending."""
    rows = index.fetch("SELECT step, row FROM step WHERE step > ? ORDER BY step", above)
    return [(step, json.loads(row)) for step, row in rows]


def restore(index: Index, version: int, strict: bool) -> list[dict[str, Any]]:
    """What is known of the steps > `version`, ascending, each with its sequences in submission order.

    Recorded batches are to be trained again: their TRAINED sequences are BATCHED again. A step without a recorded
    batch goes on from what it has; `strict`: it is forgotten, and its prompts are admitted again.
    """
    index.write("UPDATE seq SET state = ? WHERE step > ? AND state = ?", State.BATCHED, version, State.TRAINED)
    index.write("UPDATE batch SET state = ? WHERE step > ?", State.BATCHED, version)
    if strict:
        unfinished = "step > ? AND step NOT IN (SELECT step FROM batch)"
        index.write(f"DELETE FROM seg WHERE seq_id IN (SELECT id FROM seq WHERE {unfinished})", version)
        index.write(f"DELETE FROM seq WHERE {unfinished}", version)
    batched = {step for (step,) in index.fetch("SELECT step FROM batch WHERE step > ?", version)}
    rows = index.fetch(
        "SELECT seq.step, id, state, coalesce(sum(num_tokens), 0), count(idx), min(version), max(version), score,"
        " failure FROM seq LEFT JOIN seg ON seq_id = id WHERE seq.step > ? GROUP BY id"
        " ORDER BY seq.step, prompt_no, member",
        version,
    )
    names = ("id", "state", "num_tokens", "num_segments", "min_version", "max_version", "score", "failure")
    steps: dict[int, dict[str, Any]] = {}
    for step, *values in rows:
        found = steps.setdefault(step, {"step": step, "batched": step in batched, "sequences": []})
        found["sequences"].append(dict(zip(names, values, strict=True)))
    return list(steps.values())


def count(index: Index) -> dict[str, int]:
    """How many sequences are in each state, and how many segments, batches and step rows there are."""
    counts = dict.fromkeys(map(str, State), 0)
    counts.update(index.fetch("SELECT state, count(*) FROM seq GROUP BY state"))
    for name, table in (("segments", "seg"), ("batches", "batch"), ("steps", "step")):
        counts[name] = index.fetch(f"SELECT count(*) FROM {table}")[0][0]
    return counts


def _states(index: Index, step: int) -> dict[str, State]:
    rows = index.fetch("SELECT id, state FROM seq WHERE step = ? ORDER BY prompt_no, member", step)
    return {id: State(state) for id, state in rows}
