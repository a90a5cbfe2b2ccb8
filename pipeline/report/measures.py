"""Where the time went and what was learned: tables as HTML, and the curves of steps."""

from collections.abc import Iterator

from pipeline.core.dag import STAGES
from pipeline.core.events import Role
from pipeline.report import figures
from pipeline.report.charts import Chart
from pipeline.report.facts import Facts
from pipeline.report.run import RunRecord
from pipeline.report.tables import Cell, table, words


def slot_time(facts: Facts) -> str:
    if not facts.slots:
        return ""
    rows = [
        [words(figures.WORDS[code]), Cell(f"{share:.1%}")]
        for code, share in sorted(facts.slots.items(), key=lambda item: -item[1])
        if share >= 0.0005
    ]
    return f'{table([words("slot time"), Cell("share")], rows)}<p class="note">Without the first step.</p>'


def stage_time(record: RunRecord) -> str:
    names = [stage.name for stage in STAGES if stage.name not in ("batch", "record", "checkpoint")]
    header = [words("stage"), Cell("ran, s/step"), Cell("its tasks worked, s/step"), Cell("of a step")]
    whole_s, num = record.total("timing_s/step"), len(record.trained)
    rows = []
    for name in (*names, "save_checkpoint", "queue", "control"):
        ran, worked = record.total(f"timing_s/{name}"), record.total(f"task_s/{name}")
        if ran and num:
            found = [f"{ran / num:.2f}", f"{worked / num:.2f}" if worked else "-", f"{ran / whole_s:.0%}"]
            rows.append([words(name), *map(Cell, found)])
    return (
        f'{table(header, rows)}<p class="note">Stages overlap, so shares may come to more than 100 %. Control: none of '
        "them ran, or nobody worked in the one that did. Queue: what is written before training.</p>"
        if rows
        else ""
    )


def learning(record: RunRecord) -> Iterator[tuple[str, Chart | None, str]]:
    def curves(*names: tuple[str, str], unit: str, low: float | None = None) -> Chart | None:
        return figures.curves(record, names, unit, low)

    reward = (("mean", "critic/score/mean"), ("least", "critic/score/min"), ("most", "critic/score/max"))
    yield "reward", curves(*reward, unit="reward"), "Reward of a step's responses, as judged."
    yield "accuracy", curves(("held out", "val/acc"), unit="accuracy"), "Right answers to held-out prompts."
    judge = (
        ("judged right, and wrong", "genrm/false_positive_rate"),
        ("judged wrong, and right", "genrm/false_negative_rate"),
    )
    yield "judge", curves(*judge, unit="share", low=0.0), "The judge, by an exact checker that training never sees."
    long = (
        ("mean", "response_length/mean"),
        ("longest", "response_length/max"),
        ("verdicts, mean", "genrm/out_tokens/mean"),
    )
    yield "tokens", curves(*long, unit="tokens", low=0.0), "Tokens of responses and verdicts."
    old = (("mean", "staleness/mean"), ("oldest", "staleness/max"))
    yield "staleness", curves(*old, unit="versions", low=0.0), "How old the trained tokens were."
    useful = (("cut off", "response_length/clip_ratio"), ("judge failed", "genrm/fail_rate"))
    yield "useless", curves(*useful, unit="share", low=0.0), "Responses that reached their limit, and failed verdicts."
    yield "groups", curves(("used", "train/num_groups_used"), unit="groups", low=0.0), "Groups whose rewards differ."
    yield "entropy", curves(("entropy", "actor/entropy"), unit="nats", low=0.0), "Entropy of the policy's tokens."
    yield (
        "kl",
        curves(("drift", "actor/ppo_kl"), ("to the reference", "actor/kl_loss"), unit="nats"),
        "Drift of the policy.",
    )
    yield "grad", curves(("norm", "actor/grad_norm"), unit="norm", low=0.0), "Gradient, before it is cut."
    gap = (("largest", "mismatch/max_abs_logprob_diff"), ("mean", "mismatch/mean_abs_logprob_diff"))
    yield "mismatch", curves(*gap, unit="nats", low=0.0), "Logprobs of on-policy tokens: trainer less engine."


def length_table(facts: Facts) -> str:
    rows = [
        [
            words("responses" if role is Role.ROLLOUT else "verdicts"),
            Cell(f"{low:.0f}"),
            Cell(f"{high:.0f}"),
            Cell(f"{high / low:.1f}"),
        ]
        for role, (low, high) in facts.lengths.items()
    ]
    header = [words(""), Cell("median tokens"), Cell("99 %"), Cell("ratio")]
    tail = f"<p>In {facts.tail:.0%} of the time, rollout waited for the last tenth of a step.</p>" if facts.tail else ""
    return f"{table(header, rows)}{tail}" if rows else ""
