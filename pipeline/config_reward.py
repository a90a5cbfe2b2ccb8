"""`reward`: who judges a response, and how what is said of it becomes a score."""

from typing import Literal

from pydantic import Field, model_validator

from pipeline.config_engine import EngineOptions
from pipeline.config_types import Float, Int, Section


class Verdict(Section):
    """How the judge's generated text becomes a score."""

    kind: Literal["choice", "number"] = "choice"
    marker: str = Field(default="Verdict:", min_length=1, description="The verdict follows the last one of these")
    choices: dict[str, Float] = Field(
        default={"yes": 1.0, "no": 0.0}, min_length=1, description="kind: choice; word to score"
    )
    minimum: Float = Field(default=0.0, description="kind: number")
    maximum: Float = Field(default=1.0, description="kind: number")
    reasoning_end: str = Field(
        default="", description="Ends the reasoning (`</think>`); what precedes it gives no score"
    )
    structured: bool = Field(default=False, description="Force the form of the verdict in the engine")

    @model_validator(mode="after")
    def _has_a_range(self) -> "Verdict":
        if self.minimum >= self.maximum:
            raise ValueError(f"minimum {self.minimum} is not below maximum {self.maximum}")
        return self


class GenRM(Section):
    template: str = Field(description="Jinja template (text or a file's path) of the judge's user message")
    verdict: Verdict = Verdict()
    max_tokens: Int = Field(default=256, ge=1)
    temperature: Float = Field(default=0.0, ge=0)
    timeout_s: Float = Field(default=60.0, gt=0)
    retries: Int = Field(default=1, ge=0, description="For transient failures: timeout, empty, truncated, unparsed")
    engine: EngineOptions = EngineOptions()


class Reward(Section):
    genrm: GenRM
    permute_verdicts: bool = Field(
        default=False, description="Test switch: shuffle the scores within each step, so that nothing can be learnt"
    )
