"""A stage of one's own: responses that are too long are not trained. It saves what it has done after each item."""

import time


def length_filter(stage):
    longest, pause_s = stage.options["longest"], stage.options.get("pause_s", 0.0)
    seen = stage.load() or {}  # id to number of tokens, from an earlier life of this step
    for row in stage.sequences():
        if row.id not in seen:
            print(f"look at {row.id}", flush=True)  # into the stage's log
            time.sleep(pause_s)
            seen[row.id] = len(row.tokens)
            stage.save(seen)  # durable now; a run that stops goes on after this item
    return {
        "drop": {id: "too_long" for id, length in seen.items() if length > longest},
        "metrics": {"mean_tokens": sum(seen.values()) / len(seen)},
    }
