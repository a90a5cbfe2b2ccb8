"""Options of an inference engine, of either role."""

from typing import Any, Literal

from pydantic import Field

from pipeline.config_types import Int, Section


class EngineOptions(Section):
    name: Literal["vllm", "emulated"] = Field(default="vllm", description="emulated: no model, words without meaning")
    kv_cache_bytes: Int = Field(default=64 << 20, ge=1 << 20, description="Bytes of KV cache per replica")
    max_num_seqs: Int = Field(default=128, ge=1, description="Sequences that a replica runs at once")
    enable_prefix_caching: bool = Field(default=True, description="Prompts that begin alike are computed once")
    options: dict[str, Any] = Field(default={}, description="Passed to the engine as they are")
