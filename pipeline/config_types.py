"""The kinds of values in the configuration: what YAML and a command line write is read as what is meant."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Section(BaseModel):
    """A part of the tree: an unknown key, or a value of another type, is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def _float_from_text(value: Any) -> Any:
    """The schema says that `"1e-6"` is a number. A bool is none."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        raise ValueError(f"{value!r} is not a number") from None


def _int_from_text(value: Any) -> Any:
    """`"16"`, `16.0` and `1.6e1` are whole numbers."""
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            value = _float_from_text(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _paths(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _pair(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


Float = Annotated[float, BeforeValidator(_float_from_text)]
Int = Annotated[int, BeforeValidator(_int_from_text)]
Share = Annotated[Float, Field(ge=0, lt=1)]
Pair = BeforeValidator(_pair)
Paths = Annotated[list[str], BeforeValidator(_paths)]
Dtype = Literal["float32", "bfloat16", "float16"]
