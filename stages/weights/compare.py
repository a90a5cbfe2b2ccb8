"""Do the tensors given fit those expected? In words."""

from collections.abc import Mapping

_SHOWN = 4


def differing(given: Mapping[str, object], expected: Mapping[str, object]) -> str:
    """The first differences between two tables by tensor name (of shapes, dtypes, entries); "" if they are equal."""
    lost = [f"{name} is missing" for name in sorted(expected.keys() - given.keys())]
    new = [f"{name} is unknown" for name in sorted(given.keys() - expected.keys())]
    changed = [
        f"{name} is {given[name]}, not {expected[name]}"
        for name in sorted(given.keys() & expected.keys())
        if given[name] != expected[name]
    ]
    found = lost + new + changed
    return "; ".join(found[:_SHOWN]) + (f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")
