"""The judge's prompt: a sandboxed Jinja template over the policy's prompt and response, rendered to one user message.

The response is hostile: it is a value, never template source, and the tokenizer splits any control token that it
spells. The ground truth is not given: what the judge cannot see, it cannot leak.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateSyntaxError, meta
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from pipeline.core.errors import ConfigError
from pipeline.data import Message
from stages.text import Tokenizer

VARIABLES = ("prompt", "response", "messages")
"""prompt: the last user message; response: the policy's text; messages: the whole chat, [{role, content}]."""
OTHER = "other"
"""Where responses are compared: the other one."""

_LONGEST = 1 << 20
"""Characters that the sample texts may become."""

_SAMPLES = ("a response", "", "two\nlines; and {{ braces }}")


class JudgePrompt:
    """Renders the prompts of one judge. `template` is the text or a file's path, as in the config."""

    def __init__(self, template: str, tokenizer: Tokenizer | None = None) -> None:
        """Without a tokenizer (of a judge behind a URL) there are texts, and no ids."""
        self._source = load_template(template)
        self._tokenizer = tokenizer

    @cached_property
    def _template(self) -> Template:
        return _environment().from_string(self._source)

    @cached_property
    def needs_messages(self) -> bool:
        return "messages" in meta.find_undeclared_variables(_environment().parse(self._source))

    def text(self, prompt: str, response: str, messages: Sequence[Message] = (), other: str | None = None) -> str:
        compared = {} if other is None else {OTHER: other}
        return self._template.render(prompt=prompt, response=response, messages=messages, **compared)

    def ids(self, prompt: str, response: str, messages: Sequence[Message] = (), other: str | None = None) -> list[int]:
        """The token ids of the judge's chat up to where the judge begins."""
        assert self._tokenizer is not None
        message = Message(role="user", content=self.text(prompt, response, messages, other))
        return self._tokenizer.encode_chat([message])


def load_template(template: str) -> str:
    """The text of a template given as text or as the path of a file. Raises ConfigError if there is no such file."""
    if "{{" in template or "{%" in template or "\n" in template:
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"reward.genrm.template {template[:200]!r} is neither a template (it shows no {{{{ response }}}}) nor the "
            f"path of a readable file: {type(error).__name__}"
        ) from None


def check_template(template: str, *, is_pairwise: bool = False) -> None:
    """Raise ConfigError for a template that does not compile, does not show the response (where responses are compared,
    both), reads an unknown variable or fails on sample texts."""
    known = (*VARIABLES, OTHER) if is_pairwise else VARIABLES
    source = load_template(template)
    where = "reward.genrm.template"
    try:
        compiled = _environment().from_string(source)
        variables = meta.find_undeclared_variables(_environment().parse(source)) - set(compiled.globals)
    except TemplateSyntaxError as error:
        raise ConfigError(f"{where}, line {error.lineno}: {error.message}") from None
    if unknown := sorted(variables - set(known)):
        raise ConfigError(f"{where}: unknown variable {unknown[0]!r}; valid: {', '.join(known)}")
    if "response" not in variables:
        raise ConfigError(f"{where}: it never shows the {{{{ response }}}} that is to be judged")
    if is_pairwise and OTHER not in variables:
        raise ConfigError(f"{where}: it never shows the {{{{ other }}}} response, with which mode pairwise compares")
    for response in _SAMPLES:
        messages = [Message(role="user", content="a prompt")]
        try:
            values = {"prompt": "a prompt", "response": response, "messages": messages, OTHER: response}
            text = _bounded(compiled.generate(**values))
        except Exception as error:  # the border to the user's code, which may raise anything
            reason = str(error) or type(error).__name__
            raise ConfigError(f"{where}: it fails on the response {response!r}: {reason}") from None
        if response and not text.strip():
            raise ConfigError(f"{where}: it renders to nothing for the response {response!r}")


def _bounded(pieces: Iterable[str]) -> str:
    """The text of a sample. A loop that writes without end is stopped; one that writes nothing is not."""
    text: list[str] = []
    length = 0
    for piece in pieces:
        text.append(piece)
        length += len(piece)
        if length > _LONGEST:
            raise ValueError(f"it renders to more than {_LONGEST} characters")
    return "".join(text)


class _Environment(ImmutableSandboxedEnvironment):
    """A template reaches no attribute that leads out of its values, changes none of them, and makes nothing huge out
    of small things."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("powers are not computed")
        for text, times in ((left, right), (right, left)):
            if isinstance(times, int) and hasattr(text, "__len__") and len(text) * times > _LONGEST:
                raise SecurityError(f"it repeats a text {times} times")
        return super().call_binop(context, operator, left, right)


def _environment() -> _Environment:
    """Without Jinja's two sources of chance: a run must be able to repeat its prompts."""
    environment = _Environment(undefined=StrictUndefined, autoescape=False)
    del environment.globals["lipsum"], environment.filters["random"]
    return environment
