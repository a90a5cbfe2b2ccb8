"""`rollout`: how the policy answers."""

from typing import Any, Literal

from pydantic import Field

from pipeline.config_engine import EngineOptions
from pipeline.config_types import Float, Int, Section


class Rollout(Section):
    n: Int = Field(default=8, ge=2, description="Responses per prompt (the group)")
    temperature: Float = Field(default=1.0, gt=0, description="Of sampling; the trainer uses the same")
    max_response_length: Int = Field(default=1024, ge=1, description="Tokens")
    flush_s: Float = Field(default=1.0, gt=0, description="Unfinished sequences' tokens are made durable this often")
    on_update: Literal["recompute", "keep_kv"] = Field(
        default="recompute",
        description="What running sequences do when new weights come: stop, and go on from recomputed caches; or go on "
        "at once with the caches of the old weights (needs enable_prefix_caching: false)",
    )
    function: str = Field(
        default="",
        description="module:name or path/to/file.py:name of an async function that holds the conversation, with tools "
        "and several turns; empty: one response to a prompt",
    )
    function_options: dict[str, Any] = Field(default={}, description="Keyword arguments of the function")
    engine: EngineOptions = EngineOptions()
