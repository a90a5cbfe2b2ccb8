import json

from pipeline.core.dag import StepProgress
from pipeline.metrics import step_row
from pipeline.step_parts import StepParts


def progress(step: int, **stages: tuple[float, float]) -> StepProgress:
    made = StepProgress.open(step, set())
    for stage, (begin, end) in stages.items():
        made.begin(stage, begin)
        made.finish(stage, end)
    return made


def test_the_row_of_an_interrupted_step_has_what_was_measured_before_the_interruption() -> None:
    counted = {"rollout": [{"rollout/num_tokens": 7.0, "task_s/rollout": 2.0}], "reward": [{"genrm/num_verdicts": 4.0}]}
    parts = StepParts(metrics=counted, queue_depth=4)
    this = progress(5, rollout=(102.0, 105.0), reward=(105.0, 106.0))
    this.begin("batch", 106.0)
    before = progress(4, checkpoint=(101.0, 103.0))
    before.begin("record", 100.0)
    before.finish("record", 100.0)
    kept = json.loads(json.dumps(parts.kept(this, before, now=107.0)))

    restored = StepParts.restored(kept)
    restored.metrics["train"] = [{"actor/lr": 0.5}]
    restored.num_sequences = (3, 1)
    row = step_row(5, restored, *restored.whole([("train", 20.0, 24.0)], 20.0), 24.0)
    assert (row["rollout/num_tokens"], row["genrm/num_verdicts"], row["actor/lr"]) == (7.0, 4.0, 0.5)
    assert (row["queue/depth"], row["queue/num_trained"]) == (4.0, 3.0)
    assert (row["timing_s/rollout"], row["timing_s/reward"], row["timing_s/queue"]) == (3.0, 1.0, 1.0)
    assert (row["timing_s/save_checkpoint"], row["timing_s/train"]) == (2.0, 4.0)
    assert row["timing_s/step"] == 11.0  # 7 s until the batch was recorded, 4 s afterwards


def test_a_step_without_interruption_is_as_it_was() -> None:
    spans = [("train", 1.0, 2.0)]
    assert StepParts().whole(spans, 1.0) == (spans, 1.0)
