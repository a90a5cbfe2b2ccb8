"""The tree of errors. Every one can be pickled and says what was given, what is valid and where to look.

PivotError
├── ConfigError          the user's fault: found at submit, exit code 2
│   └── DataError        a data file: carries file, line, column
├── RunError             a run cannot go on: exit code 1
│   ├── StageFailed      a stage task raised; carries its log tail
│   └── RestartsExceeded a worker died more often than `limits.restarts` allows
├── UpdateRefused        a weight update does not fit the engine: the old version stays
├── WeightsUnavailable   shared memory does not hold the weights asked for, or not in time
├── Fenced               an older attempt spoke
├── NotOwner             a sequence was written by a task that does not own it
├── SlurmError           a client of Slurm failed: carries what it said
└── QueueUnavailable     the queue server did not answer within the limit
"""


class PivotError(Exception):
    """Root of the tree."""


class ConfigError(PivotError):
    """Bad input of the user, found at submit."""


class DataError(ConfigError):
    """A data file that does not fit the declared schema; the message names file, line and column."""


class RunError(PivotError):
    """The run cannot go on."""


class StageFailed(RunError):
    """A stage task raised."""


class RestartsExceeded(RunError):
    """A worker died again and again without progress in between."""


class QueueDamaged(RunError):
    """Bytes of the queue that the index calls durable are missing or changed."""


class UpdateRefused(PivotError):
    """Names, shapes or dtypes of a weight update do not match; nothing was changed."""


class WeightsUnavailable(PivotError):
    """The weight store does not hold the version asked for, or its slot was not free within the limit."""


class Fenced(PivotError):
    """A message or write of an older attempt."""


class ChannelBroken(PivotError):
    """A peer's frame is missing or undecodable, or it is not connected (any more)."""

    def __init__(self, reason: str, peer: bytes = b"") -> None:
        super().__init__(reason, peer)
        self.peer = peer

    def __str__(self) -> str:
        return str(self.args[0])


class NotOwner(PivotError):
    """A write to a sequence by a task that does not own it (any more)."""


class SlurmError(PivotError):
    """A client of Slurm failed. `is_outage`: Slurm's controller could not be asked, so nothing was learnt."""

    def __init__(self, message: str, is_outage: bool = False) -> None:
        super().__init__(message, is_outage)
        self.is_outage = is_outage

    def __str__(self) -> str:
        return str(self.args[0])


class QueueUnavailable(PivotError):
    """The queue server did not answer within the limit."""
