"""The decisions to shift, each with what it was predicted and is measured to be worth, as HTML."""

from pipeline.core.events import Role
from pipeline.report.run import RunRecord
from pipeline.report.tables import Cell, shown, table, words
from pipeline.watching.decided import Decided
from pipeline.wording import number

_MOST = 3000
"""Of decisions: the last ones."""


def shift_table(record: RunRecord) -> str:
    if not record.shifting:
        num = sum(bool(shift["old"]) for shift in record.decided.shifts)
        return f"<p>{num} times a block of slots changed hands, none by a planner's decision.</p>" if num else ""
    names = ("step", "gain", "measured", "regret", "cost", "measured", "took")
    header = [Cell("at, s"), words("decision"), words("cause"), *(Cell(f"{n}, s" if n != "step" else n) for n in names)]
    rows = [_decision(record, decided) for decided in record.shifting[-_MOST:]]
    return (
        f"{_totals(record)}{table(header, rows, is_listed=True)}"
        '<p class="note">Gain: predicted when it was decided, and measured: what staying was predicted to be worth, '
        "less what was seen. Regret: the one less the other. Cost: seconds in which the slots that were shifted served "
        "nobody, spread over all. Took: the slowest of its shifts.</p>"
    )


def _totals(record: RunRecord) -> str:
    worths = [decided.worth for decided in record.shifting if decided.worth]
    trains = sum(Role.TRAIN in (shift["old"], shift["new"]) for shift in record.decided.shifts if shift["old"])
    done = sum(bool(shift["old"]) for shift in record.decided.shifts)
    text = (
        f"The planner was asked {len(record.decided.decisions)} times and shifted {len(record.shifting)} times; "
        f"{done} blocks changed hands, {trains} of them to training or from it."
    )
    if worths:
        gain, seen = (sum(w[name] for w in worths) / len(worths) for name in ("predicted_gain_s", "measured_gain_s"))
        text += f" Mean gain {gain:+.2f} s predicted, {seen:+.2f} s measured, regret {gain - seen:+.2f} s."
    return f"<p>{shown(text)}</p>"


def _decision(record: RunRecord, decided: Decided) -> list[Cell]:
    line, worth, chosen = decided.line, decided.worth, decided.chosen
    predicted, measured = decided.cost_s
    took = [shift["took_s"] for shift in decided.shifts if shift["took_s"] is not None]
    moves = list(line["moves"].values())
    size = line["block_slots"]
    parts = [f"{size * moves.count(role)} to {role}" for role in dict.fromkeys(moves)]
    return [
        Cell(f"{record.wall(line):.1f}"),
        words(" and ".join(parts)),
        words(line["cause"] or "a tick"),
        Cell(str(line["step"])),
        Cell(number(chosen["gain_s"] if chosen else None, "+.2f")),
        Cell(number(worth["measured_gain_s"] if worth else None, "+.2f")),
        Cell(number(worth["regret_s"] if worth else None, "+.2f")),
        Cell(number(predicted, ".2f")),
        Cell(number(measured, ".2f")),
        Cell(number(max(took, default=None), ".2f")),
    ]
