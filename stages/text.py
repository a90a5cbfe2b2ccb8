"""Text to token ids and back. Rollout, judge and trainer use this one rendering, so their prompts cannot differ.

Two rules hold for every tokenizer here. A chat has exactly one BOS if its template or tokenizer wants one, else none.
And the text of a message never becomes a control token, whatever it spells: control tokens come from the template.
"""

import json
import re
import secrets
from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from pipeline.core.errors import ConfigError
from pipeline.data import Message
from stages.engines.vllm_start import hide_broken_packages

EMULATED = "emulated"
_MARKUP = re.compile(r"<\S+>|\[\S+\]")


class Tokenizer(Hashable, Protocol):
    """`stop_ids`: tokens that end a response (EOS among them). `vocab_size`: every id below it can be decoded."""

    bos_id: int | None
    eos_id: int
    pad_id: int
    stop_ids: tuple[int, ...]
    vocab_size: int

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a chat up to where the assistant begins. Raises ValueError if the template refuses it."""

    def encode(self, text: str) -> list[int]:
        """The ids of bare text: no BOS, no control token."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids; control tokens are spelt out."""

    def control_id(self, text: str) -> int | None:
        """The control token that is spelt so; None if there is none. Only its id is it: encoded text never is."""


def decode_response(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of a response without the token that ended it."""
    return tokenizer.decode(ids[:-1] if ids and ids[-1] in tokenizer.stop_ids else ids)


@lru_cache(maxsize=4)
def load_tokenizer(path: str, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer of a model folder, or the byte tokenizer for `emulated`; shared by all callers of a process.

    Raises ConfigError for what `check_tokenizer` refuses.
    """
    if path == EMULATED:
        return ByteTokenizer()
    check_tokenizer(path)
    return HfTokenizer(path, trust_remote_code)


class ByteTokenizer:
    """One token per byte of UTF-8: byte b is id b + 3. For emulated models, which have no tokenizer of their own."""

    pad_id = 0
    bos_id: int | None = 1
    eos_id = 2
    stop_ids: tuple[int, ...] = (2,)
    vocab_size = 259

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        chat = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        return [1, *self.encode(f"{chat}assistant: ")]

    def encode(self, text: str) -> list[int]:
        return [byte + 3 for byte in text.encode("utf-8")]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i - 3 for i in ids if i >= 3).decode("utf-8", errors="replace")

    def control_id(self, text: str) -> int | None:
        return None


class HfTokenizer:
    """The tokenizer of a Hugging Face model folder."""

    def __init__(self, path: str, trust_remote_code: bool = False) -> None:
        self._hf = _load_hf(path, trust_remote_code)
        if self._hf.eos_token_id is None or self._hf.pad_token_id is None:
            raise ConfigError(f"{path}: the tokenizer has no {'EOS' if self._hf.eos_token_id is None else 'pad'} token")
        self.bos_id: int | None = self._hf.bos_token_id
        self.eos_id: int = self._hf.eos_token_id
        self.pad_id: int = self._hf.pad_token_id
        self.stop_ids = tuple(sorted({self.eos_id, *_generation_stop_ids(Path(path))}))
        self.vocab_size = len(self._hf)
        # What the tokenizer puts before bare text: the BOS, for a template that leaves it to the tokenizer.
        self._bos = [self.bos_id] if self.bos_id is not None and self._hf.encode("a")[:1] == [self.bos_id] else []
        backend = getattr(self._hf, "backend_tokenizer", None)
        self._is_normalizing = backend is not None and backend.normalizer is not None
        self._control_ids, self._control = self._find_control_tokens()
        # A control token's first character, wherever one begins, also inside another.
        self._control_start = re.compile(f"(?=(?:{self._control.pattern}))(.)", re.DOTALL)
        self._seam = f"seam{secrets.token_hex(16)}"  # cannot occur in a text; plain letters survive any template filter

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        from jinja2 import TemplateError

        chat = [{"role": message["role"], "content": self._break_control(message["content"])} for message in messages]
        try:
            text = self._hf.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        except TemplateError as error:
            raise ValueError(f"the chat template refuses the messages: {error}") from error
        ids = self._encode_broken(text)
        return ids if ids[:1] == self._bos else self._bos + ids

    def encode(self, text: str) -> list[int]:
        return self._encode_broken(self._break_control(text))

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._hf.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def control_id(self, text: str) -> int | None:
        return self._hf.convert_tokens_to_ids(text) if self._control.fullmatch(text) else None

    def _find_control_tokens(self) -> tuple[frozenset[int], re.Pattern[str]]:
        """Tokens that the tokenizer declares special, that stop a response, or that look like markup: their ids, and
        what spells them. Chat models add `</think>` and `<tool_call>` without declaring them special; other added
        tokens are words, or runs of blanks."""
        added = {
            i: token.content
            for i, token in self._hf.added_tokens_decoder.items()
            if token.special or _MARKUP.fullmatch(token.content)
        }
        ids = {*added, *self._hf.all_special_ids, *self.stop_ids}
        spelt = {added.get(i) or self._hf.convert_ids_to_tokens(i) for i in ids}
        longest_first = sorted(spelt, key=lambda text: (-len(text), text))
        # The unknown token is what a strange character rightly becomes.
        return frozenset(ids - {self._hf.unk_token_id}), re.compile("|".join(map(re.escape, longest_first)))

    def _break_control(self, text: str) -> str:
        """Put a seam into each control token that the text spells: the template may then trim or quote the text as
        it likes, and what is encoded piece by piece between the seams holds no whole control token."""
        if not self._control.search(text):
            return text
        return self._control_start.sub(lambda match: f"{match[1]}{self._seam}", text)

    def _encode_broken(self, text: str) -> list[int]:
        """In each piece the control tokens that are spelt are the template's own, and only these may come out."""
        pieces = text.split(self._seam)
        encoded = self._hf(pieces, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return [
            i
            for number, (piece, ids) in enumerate(zip(pieces, encoded["input_ids"], strict=True))
            for i in (ids if self._is_faithful(piece, ids, encoded, number) else self._encode_by_character(piece))
        ]

    def _is_faithful(self, piece: str, ids: list[int], encoded: Any, number: int) -> bool:
        """Whether its control tokens came out, and no others. A normalisation makes control tokens out of other text
        (full-width letters) and takes them away (`>` and a combining stroke are one character), so which text became
        a control token counts, not how many did."""
        spelt = self._control.findall(piece)
        if not self._is_normalizing:
            return sum(i in self._control_ids for i in ids) <= len(spelt)
        offsets = encoded.encodings[number].offsets
        sources = [piece[slice(*at)].strip() for i, at in zip(ids, offsets, strict=True) if i in self._control_ids]
        return sources == spelt

    def _encode_by_character(self, text: str) -> list[int]:
        """Each character on its own, but for the control tokens that are spelt."""
        ids: list[int] = []
        end = 0
        for match in self._control.finditer(text):
            ids += self._encode_plain(text[end : match.start()])
            ids += self._hf.encode(match[0], add_special_tokens=False)
            end = match.end()
        return ids + self._encode_plain(text[end:])

    def _encode_plain(self, text: Iterable[str]) -> list[int]:
        encoded = (self._hf.encode(character, add_special_tokens=False) for character in text)
        return [i for ids in encoded for i in ids if i not in self._control_ids]


def check_tokenizer(path: str) -> None:
    """Raise ConfigError if the model folder lacks a tokenizer, an EOS or pad token, or a chat template.

    Reads small JSON files only: nothing heavy is imported, so it can run at submit.
    """
    if path == EMULATED:
        return
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(f"{path}: no such folder; valid: a model folder with a tokenizer, or {EMULATED!r}")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")):
        raise ConfigError(f"{path}: no tokenizer.json (nor tokenizer.model, vocab.json, vocab.txt)")
    config = _read_object(folder / "tokenizer_config.json")
    special = _read_object(folder / "special_tokens_map.json") | {k: v for k, v in config.items() if v is not None}
    for name in ("eos_token", "pad_token"):
        if not special.get(name):
            advice = "; the EOS token will do" if name == "pad_token" else ""
            raise ConfigError(f"{path}: no {name} in tokenizer_config.json: add one{advice}")
    has_template = config.get("chat_template") or _read_object(folder / "chat_template.json").get("chat_template")
    if not has_template and not (folder / "chat_template.jinja").is_file():
        raise ConfigError(f"{path}: no chat template (chat_template.jinja, or chat_template in tokenizer_config.json)")


def check_vocabulary(path: str) -> None:
    """Raise ConfigError if the tokenizer of a model folder makes ids that the model has no embedding for."""
    folder = Path(path)
    described, tokenizer = _read_object(folder / "config.json"), _read_object(folder / "tokenizer.json")
    size = described.get("vocab_size") or (described.get("text_config") or {}).get("vocab_size")
    if path == EMULATED or not size or not tokenizer:
        return
    known = (tokenizer.get("model") or {}).get("vocab") or ()
    ids = [len(known) - 1, *(token["id"] for token in tokenizer.get("added_tokens") or ())]
    if (num := max(ids) + 1) > size:
        raise ConfigError(
            f"{path}: tokenizer.json has {num} tokens, but vocab_size in config.json is {size}: the tokenizer is "
            "another model's"
        )


def _read_object(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file}: bad JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: valid is a JSON object")
    return value


def _generation_stop_ids(folder: Path) -> list[int]:
    """Chat models often end a turn with another token than EOS and say so there."""
    value = _read_object(folder / "generation_config.json").get("eos_token_id")
    return [] if value is None else [value] if isinstance(value, int) else list(value)


def _load_hf(path: str, trust_remote_code: bool) -> Any:
    hide_broken_packages()
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
