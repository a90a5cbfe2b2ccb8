"""The channel's message about what an engine does: what the scheduler and the planner learn from."""

import msgspec


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """As those of pipeline.wire."""


class Counts(_Message, frozen=True):
    """Of an engine. What follows `rss_bytes`: since the last one, as in pipeline.core.reports.ReplicaReport;
    `kv_tokens` are those held now."""

    worker: str
    running: int
    waiting: int
    num_tokens: int
    rss_bytes: int
    kv_tokens: int = 0
    num_iterations: int = 0
    decode_s: float = 0.0
    batch: float = 0.0
    context: float = 0.0
    prefill_tokens: int = 0
    prefill_s: float = 0.0
    num_started: int = 0
    started_tokens: int = 0
    started_prefill_tokens: int = 0
