"""`reward`: who judges a response, and how what is said of it becomes a score."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from pipeline.config_engine import EngineOptions
from pipeline.config_types import Float, Int, Section

GENRM = "genrm"
"""The judge's name among `reward.weights`."""


class Verdict(Section):
    """How the judge's generated text becomes a score."""

    kind: Literal["choice", "number"] = Field(default="choice", description="A word of `choices`, or a number")
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


class Endpoint(Section):
    """A judge behind a URL: any server that speaks OpenAI's chat completions."""

    url: str = Field(description="Up to and with `/v1`")
    model: str = Field(min_length=1, description="The model's name there")
    key_variable: str = Field(default="", description="Environment variable that holds the key; empty: none is sent")
    concurrency: Int = Field(default=16, ge=1, description="Requests at once, of each reward replica")
    patience_s: Float = Field(
        default=300.0, ge=0, description="A server that is down, busy or broken is asked again for so long"
    )

    @field_validator("url")
    @classmethod
    def _is_a_url(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError("it must begin with http:// or https://")
        return url.rstrip("/")


class GenRM(Section):
    template: str = Field(description="Jinja template (text or a file's path) of the judge's user message")
    mode: Literal["pointwise", "pairwise", "soft"] = Field(
        default="pointwise",
        description="pointwise: the verdict's score; pairwise: each response is compared with the others to its prompt "
        "(`{{ other }}` in the template), and its score is the mean (needs placement.admission: barrier); soft: of two "
        "choices, the mean of their scores by the probability of what the judge said",
    )
    opponents: Int = Field(default=0, ge=0, description="mode: pairwise; with how many others, 0: with all")
    verdict: Verdict = Verdict()
    max_tokens: Int = Field(default=256, ge=1, description="Of a critique with its verdict")
    temperature: Float = Field(default=0.0, ge=0, description="Of the judge's sampling; 0: greedy")
    timeout_s: Float = Field(default=60.0, gt=0, description="One judgement; then it is tried again, or has failed")
    retries: Int = Field(default=1, ge=0, description="For transient failures: timeout, empty, truncated, unparsed")
    engine: EngineOptions = EngineOptions()
    endpoint: Endpoint | None = Field(default=None, description="Where the judge is, if not on slots of the run")

    @model_validator(mode="after")
    def _fits_its_mode(self) -> "GenRM":
        verdict = self.verdict
        if self.mode == "soft" and (verdict.kind != "choice" or len(verdict.choices) != 2):
            raise ValueError("mode soft needs verdict.kind: choice with two choices")
        if self.endpoint is not None and verdict.structured:
            raise ValueError("verdict.structured is for an engine of the run, and endpoint is set")
        return self


class RewardFunction(Section):
    """verl's `compute_score(data_source, solution_str, ground_truth, extra_info)`, plain or async, which returns a
    number or `{"score": number, ...}`. It runs in processes of its own."""

    path: str = Field(description="module:name (of run.code_path, or installed) or path/to/file.py:name")
    timeout_s: Float = Field(default=30.0, gt=0, description="One call; the process of one that hangs is killed")
    memory_bytes: Int = Field(default=4 << 30, ge=64 << 20, description="What each process may allocate")
    processes: Int = Field(
        default=1, ge=1, description="Per reward replica; a plain function runs once at a time in each"
    )
    concurrency: Int = Field(default=32, ge=1, description="Calls of an async function at once in each process")
    options: dict[str, Any] = Field(default={}, description="Further keyword arguments of each call")


class Reward(Section):
    genrm: GenRM | None = Field(default=None, description="The judge; without it functions alone give the score")
    functions: dict[str, RewardFunction] = Field(default={}, description="Reward functions by a name of yours")
    weights: dict[str, Float] = Field(
        default={}, description="Of `genrm` and the functions in the sum that is the score; 1 where nothing is said"
    )
    permute_verdicts: bool = Field(
        default=False, description="Test switch: shuffle the scores within each step, so that nothing can be learnt"
    )

    @model_validator(mode="after")
    def _scores_something(self) -> "Reward":
        names = [*([GENRM] if self.genrm is not None else []), *self.functions]
        if not names:
            raise ValueError("nothing gives a score: name genrm, or functions")
        if GENRM in self.functions:
            raise ValueError(f"functions.{GENRM}: that is the judge's name")
        for name in self.functions:
            if not name.isidentifier():
                raise ValueError(f"functions.{name}: valid are letters, digits and _")
        if unknown := [name for name in self.weights if name not in (*names, GENRM)]:
            raise ValueError(f"weights.{unknown[0]}: no such reward; valid: {', '.join(names)}")
        return self

    def weight(self, name: str) -> float:
        return self.weights.get(name, 1.0)
