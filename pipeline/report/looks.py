"""How roles, states and modes look in every plot and page: colours that the colour-blind tell apart (Okabe and Ito),
and dashes and hatches that say the same again, for prints without colour. Everything is drawn on white.
"""

from typing import NamedTuple

from pipeline.core.events import Role


class Look(NamedTuple):
    """`dashes`: lengths of line and gap by turns, in widths of the line, none: solid. `hatch`: `/`, `\\`, `-`, `|`, `x`
    or "" for plain."""

    colour: str
    dashes: tuple[int, ...] = ()
    hatch: str = ""


BLUE, ORANGE, GREEN, RED, SKY, PINK = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7"
GREY, DARK = "#999999", "#222222"
ROLE_LOOKS = {
    Role.ROLLOUT: Look(BLUE),
    Role.REWARD: Look(ORANGE, (5, 1), "/"),
    Role.TRAIN: Look(GREEN, (1, 1), "\\"),
}
MODE_LOOKS = {
    "colocated": Look(BLUE),
    "disaggregated": Look(ORANGE, (5, 1), "/"),
    "rollout_reward_colocated": Look(GREEN, (1, 1), "\\"),
    "trainer_pool": Look(PINK, (4, 1, 1, 1), "-"),
    "shiftable": Look(RED, (8, 2), "x"),
}
"""The same in all plots, whichever of them are there."""
OTHER_LOOK = Look(SKY, (2, 2), "|")
SERIES_LOOKS = (
    Look(BLUE),
    Look(RED, (8, 2), "x"),
    Look(GREEN, (1, 1), "\\"),
    Look(ORANGE, (5, 1), "/"),
    Look(PINK, (4, 1, 1, 1), "-"),
    OTHER_LOOK,
)
"""Of curves that have no look of their own, in this order."""
