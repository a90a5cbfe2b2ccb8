"""`stages`: the user's own ones."""

from typing import Any

from pydantic import Field, field_validator

from pipeline.config_types import Float, Section
from pipeline.core.dag import Own


class OwnStage(Section):
    """A function of the user's that a step waits for. It runs in a process of its own, beside a reward worker."""

    name: str = Field(description="Letters, digits and _; another than those of the step's stages")
    path: str = Field(description="module:name (of run.code_path, or installed) or path/to/file.py:name")
    after: list[str] = Field(default=["reward"], min_length=1, description="Stages of the step that it waits for")
    before: list[str] = Field(default=["batch"], description="Stages of the step that wait for it")
    timeout_s: Float = Field(default=600.0, gt=0, description="Then it is asked to save, and the run ends")
    options: dict[str, Any] = Field(default={}, description="What it finds as `stage.options`")

    @property
    def own(self) -> Own:
        return Own(name=self.name, after=tuple(self.after), before=tuple(self.before), timeout_s=self.timeout_s)

    @field_validator("name")
    @classmethod
    def _is_a_name(cls, name: str) -> str:
        if not name.isidentifier():
            raise ValueError(f"{name!r}: valid are letters, digits and _")
        return name
