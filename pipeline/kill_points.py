"""Named places at which a test kills the process: `PIVOT_KILL_POINT=name[:nth]` in its environment.

`kill_point(name)` is written where a death must do no harm. Without the variable it compares two strings.
"""

import os
import signal

_name, _, _nth = os.environ.get("PIVOT_KILL_POINT", "").partition(":")
_passes_left = int(_nth or 1)


def kill_point(name: str) -> None:
    """SIGKILL the own process when it comes here for the nth time."""
    global _passes_left
    if name != _name:
        return
    _passes_left -= 1
    if _passes_left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
