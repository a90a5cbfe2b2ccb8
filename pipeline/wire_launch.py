"""The channel's messages about workers that Slurm starts as steps of their own (`cluster.slurm.launcher: step`).

    agent ─LaunchAsked▶ controller ─Launch▶ launcher: the step begins; its process comes to the agent by itself
    agent ─WorkerExited▶ controller ─EndLaunch▶ launcher
    launcher ─LaunchEnded▶ controller ─LaunchEnded▶ agent

The launcher is one more peer of the controller, by the same socket and keys as the agents.
"""

import msgspec


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """As those of pipeline.wire."""


class LaunchAsked(_Message, frozen=True):
    """The agent expects that worker at its `door`, once its step has begun."""

    worker: str
    life: int
    num_slots: int
    door: str


class LauncherJoined(_Message, frozen=True):
    """It has started nothing yet."""

    pid: int


class Launch(_Message, frozen=True):
    """Start that worker as a step on the node. Ends in LaunchEnded."""

    node: str
    worker: str
    life: int
    num_slots: int
    door: str


class EndLaunch(_Message, frozen=True):
    node: str
    worker: str
    life: int


class LaunchEnded(_Message, frozen=True):
    """That step has ended, or never began; `reason` with what Slurm said."""

    node: str
    worker: str
    life: int
    reason: str
