"""Tiny tokenizers in model folders, with switchable BOS, pad, EOS, template and normalisation."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE

PAD, BOS, EOS, UNK, USER, ASSISTANT = "<|pad|>", "<s>", "</s>", "<|unk|>", "<|user|>", "<|assistant|>"
SPECIAL = [PAD, BOS, EOS, UNK, USER, ASSISTANT]
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{ raise_exception('no system role') }}"
    "{% endif %}{{ '<|' + message['role'] + '|>' + message['content'] | trim }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer(
    folder: Path,
    *,
    template: str | None = "{{ bos_token }}" + TEMPLATE,
    tokenizer_adds_bos: bool = False,
    pad_token: str | None = PAD,
    eos_token: str | None = EOS,
    is_normalizing: bool = False,
    stop_ids: Any = None,
) -> Path:
    """One token per printable character; merges, so that text and ids do not correspond one to one: `ab`, `abc`."""
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *characters, "ab", "abc"])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[("a", "b"), ("ab", "c")], unk_token=UNK))
    tokenizer.decoder = decoders.Fuse()
    if is_normalizing:
        tokenizer.normalizer = normalizers.NFKC()
    tokenizer.add_special_tokens([AddedToken(token, normalized=is_normalizing) for token in SPECIAL])
    if tokenizer_adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 1)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "unk_token": UNK}
    config |= {} if pad_token is None else {"pad_token": pad_token}
    config |= {} if eos_token is None else {"eos_token": eos_token}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    if stop_ids is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stop_ids}))
    return folder
