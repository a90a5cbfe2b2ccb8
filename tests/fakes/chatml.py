"""A ChatML tokenizer as chat models bring it: byte-level, with reasoning and tool tags that are added tokens but not
declared special. Its normalisation (NFKC, also before added tokens are looked for) is the worst case for attacks."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

START, END, TEXT_END = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
SPECIAL = [TEXT_END, START, END]
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
"""The judge begins inside its reasoning, as the templates of reasoning models have it."""


def make_chatml(folder: Path) -> Path:
    """A model folder with this tokenizer; every byte is a token, and every text can be decoded."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={character: number for number, character in enumerate(alphabet)}, merges=[]))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=True) for token in TAGS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": TEXT_END}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
