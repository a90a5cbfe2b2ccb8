"""What the core does with steps that the queue's index holds."""

import random

from pipeline.core import decisions as de
from pipeline.core import events as ev
from tests.fakes.durable import Durable, Row
from tests.fakes.plan import make_plan
from tests.fakes.world import World


def restore(*recorded: int, seed: int = 0) -> World:
    """From the base model, with the batches of two steps, and the rows of the `recorded` ones."""
    durable = Durable(recorded=list(recorded))
    for step in (1, 2):
        ids = tuple(f"{step:06d}-{i // 2:05d}-{i % 2:04d}" for i in range(4))
        durable.rows |= {id: Row(id, step, state="batched", score=1.0) for id in ids}
        durable.batches[step] = ids
    return World(make_plan(total_steps=3, evaluate_freq=1), random.Random(seed), durable=durable).start().run()


def test_a_version_stays_until_it_is_evaluated() -> None:
    """The batches are there already, so nothing but this holds the next version back."""
    for seed in range(20):
        world = restore(seed=seed)
        assert world.core.ended == de.EndRun(status="done")
        order = [(d.stage, d.step) for d in world.log if isinstance(d, de.StartTask)]
        events = [event for _, event in world.events]
        for step in (0, 1, 2):
            evaluated, published = order.index(("evaluate", step)), order.index(("publish", step + 1))
            assert evaluated < published, order
            ended = next(e for e in events if isinstance(e, ev.TaskEnded) and e.task.startswith(f"evaluate-{step}-"))
            sealed = next(e for e in events if isinstance(e, ev.VersionSealed) and e.version == step + 1)
            assert events.index(ended) < events.index(sealed)


def test_a_step_whose_row_is_durable_is_not_evaluated_again() -> None:
    world = restore(0, 1)
    assert world.core.ended == de.EndRun(status="done")
    assert [d.step for d in world.log if isinstance(d, de.StartTask) and d.stage == "evaluate"] == [2, 3]
    assert [d.step for d in world.log if isinstance(d, de.StartTask) and d.stage == "train"] == [1, 2, 3]
