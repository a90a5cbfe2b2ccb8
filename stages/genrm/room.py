"""Whether a judge's verdict fits into what it may write, and that behind its prompt. Asked at submit."""

from importlib.util import find_spec
from pathlib import Path

from pipeline.config_reward import GenRM, Verdict
from pipeline.core.errors import ConfigError
from pipeline.data import Message
from stages.genrm.prompt import JudgePrompt

_END = 1
"""The token that ends a verdict."""


def check_judge_room(path: str, genrm: GenRM, positions: int | None) -> None:
    """Raise ConfigError where no verdict can be whole. `path`: the judge's folder, `positions`: its context.

    The least is counted: a verdict without reasoning, and a prompt without the policy's response. Reads the tokenizer's
    file alone; of a folder without a tokenizer.json nothing is known.
    """
    file = Path(path) / "tokenizer.json"
    if not file.is_file() or find_spec("tokenizers") is None:
        return
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    shortest = min(_verdicts(genrm.verdict), key=count)
    if genrm.max_tokens < (least := count(shortest) + _END):
        raise ConfigError(
            f"reward.genrm.max_tokens is {genrm.max_tokens}, but the verdict {shortest!r} and its end take {least} "
            f"tokens of the judge: valid is at least {least}, and more for its reasoning"
        )
    messages = [Message(role="user", content="a prompt")]
    other = "" if genrm.mode == "pairwise" else None
    asked = count(JudgePrompt(genrm.template).text("a prompt", "", messages, other))
    if positions is not None and asked + genrm.max_tokens > positions:
        raise ConfigError(
            f"reward.genrm.max_tokens {genrm.max_tokens} + {asked} tokens of reward.genrm.template without a response "
            f"exceed the {positions} positions of the judge {path} (max_position_embeddings in its config.json)"
        )


def _verdicts(verdict: Verdict) -> list[str]:
    """The shortest texts that are one."""
    words = list(verdict.choices) if verdict.kind == "choice" else [f"{verdict.minimum:g}", f"{verdict.maximum:g}", "1"]
    return [f"{verdict.reasoning_end}{verdict.marker}{blank}{word}" for word in words for blank in ("", " ")]
