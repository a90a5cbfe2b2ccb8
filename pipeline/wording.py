"""How texts and figures are written for people, on a terminal and on a page."""

import re

# C0 and C1 controls but tab and newline; marks that reorder or hide text; line separators.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")


def visible(text: str) -> str:
    """The text with control characters spelt out: `\\x1b[2J` is read, not performed."""
    return _HIDDEN.sub(lambda m: m[0].encode("unicode_escape").decode(), text)


def number(value: float | None, form: str = ".3f", missing: str = "-") -> str:
    return missing if value is None else format(value, form)


def amount(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB" if num_bytes >= 1 << 29 else f"{num_bytes / (1 << 20):.2f} MiB"


def seconds(value: float) -> str:
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(int(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
