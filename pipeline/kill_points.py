"""Named places at which a test kills, told by the environment of a run:

    PIVOT_KILL_POINT=name[:nth[:run]]   the process that comes there for the nth time (1) kills itself;
                                        `run`: it kills the run's controller first, and the whole run dies with that
    PIVOT_KILL_MARKER=FILE              a kill creates it, and where it exists nothing is killed: the environment
                                        reaches the processes that are started instead of the killed one, too

`kill_point(name)` is written where a death must do no harm. Without the variable it compares two strings.
"""

import os
import signal

_CONTROLLER = "PIVOT_KILL_CONTROLLER"
_name, _nth, _whom = [*os.environ.get("PIVOT_KILL_POINT", "").split(":"), "", ""][:3]
_passes_left = int(_nth or 1)


def kill_point(name: str) -> None:
    """SIGKILL, never to return, when this process comes here for the nth time."""
    global _passes_left
    if name != _name:
        return
    _passes_left -= 1
    if _passes_left == 0 and _is_first():
        if _whom == "run":
            os.kill(int(os.environ[_CONTROLLER]), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def be_controller() -> None:
    """This process is the root of the run: all processes started from now on know whom to kill."""
    if _whom == "run":
        os.environ[_CONTROLLER] = str(os.getpid())


def _is_first() -> bool:
    marker = os.environ.get("PIVOT_KILL_MARKER")
    try:
        if marker:
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True
