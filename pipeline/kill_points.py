"""Named places at which a test kills, told by the environment of a run:

    PIVOT_KILL_POINT=name[@who][:nth[:run]]   the process that comes there for the nth time (1) kills itself;
                                              `who`: only a worker of that role; `run`: it kills the run's controller
                                              first, and the whole run dies with that. Several, by commas, are
                                              several kills
    PIVOT_KILL_MARKER=FILE                    a kill creates it, and where it exists nothing is killed: the environment
                                              reaches the processes that are started instead of the killed one, too.
                                              With several, each has a file of its own: FILE.name@who

`kill_point(name)` is written where a death must do no harm. Without the variable it looks into an empty dictionary.
"""

import os
import signal
from dataclasses import dataclass

_CONTROLLER = "PIVOT_KILL_CONTROLLER"


@dataclass(slots=True)
class _Kill:
    """`name`: with `@who`, as it was told."""

    name: str
    passes_left: int
    takes_run: bool


def _told(text: str) -> dict[str, list[_Kill]]:
    kills: dict[str, list[_Kill]] = {}
    for told in filter(None, text.split(",")):
        name, nth, whom = [*told.split(":"), "", ""][:3]
        kills.setdefault(name.partition("@")[0], []).append(_Kill(name, int(nth or 1), whom == "run"))
    return kills


_kills = _told(os.environ.get("PIVOT_KILL_POINT", ""))
_are_several = sum(map(len, _kills.values())) > 1
_role = ""


def kill_point(name: str) -> None:
    """SIGKILL, never to return, when this process comes here for the nth time."""
    for kill in _kills.get(name, ()):
        who = kill.name.partition("@")[2]
        if who and who != _role:
            continue
        kill.passes_left -= 1
        if kill.passes_left == 0 and _is_first(kill):
            if kill.takes_run:
                os.kill(int(os.environ[_CONTROLLER]), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


def be_worker(role: str) -> None:
    """This process is a worker of that role."""
    global _role
    _role = role


def be_controller() -> None:
    """This process is the root of the run: all processes started from now on know whom to kill."""
    if any(kill.takes_run for kills in _kills.values() for kill in kills):
        os.environ[_CONTROLLER] = str(os.getpid())


def _is_first(kill: _Kill) -> bool:
    marker = os.environ.get("PIVOT_KILL_MARKER")
    if marker and _are_several:
        marker = f"{marker}.{kill.name}"
    try:
        if marker:
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True
