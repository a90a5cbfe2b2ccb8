"""What the emulated engine says, as pure functions of seeds, positions and weights: nothing else plays a part, so a
sequence that was cut and continued anywhere is the sequence that was not.

The stream of a seed has a token at every absolute position. Where a prompt ends with the tokens that the stream has
at these positions, they are what was generated before: `begin` finds the place, and lengths count from there.
"""

import math
import zlib
from collections.abc import Collection, Sequence
from hashlib import blake2b
from statistics import NormalDist
from struct import pack

import numpy as np

from pipeline.gps.segment import EMULATED_NAME, EMULATED_SIZE
from pipeline.gps.store import Reader

BYTE_OFFSET = 3  # byte b is token b + 3; 0 pads, 1 begins, 2 ends
END_ID = 2
VOCAB_SIZE = 259
_FIRST, _NUM_PRINTABLE = BYTE_OFFSET + 32, 95  # printable ASCII


def text_ids(text: str) -> list[int]:
    return [byte + BYTE_OFFSET for byte in text.encode()]


def token_at(seed: int, position: int, stop_ids: Collection[int] = ()) -> int:
    """A printable character, never one of `stop_ids`."""
    first = _number("token", seed, position)
    for shift in range(_NUM_PRINTABLE):
        token = _FIRST + (first + shift) % _NUM_PRINTABLE
        if token not in stop_ids:
            return token
    raise ValueError("every printable character is a stop id")


def begin(prompt_ids: Sequence[int], seed: int, stop_ids: Collection[int]) -> int:
    """Where the stream took over in a prompt that may end with what it said before."""
    start = len(prompt_ids)
    while start > 0 and prompt_ids[start - 1] == token_at(seed, start - 1, stop_ids):
        start -= 1
    return start


def length_of(seed: int, median_tokens: float, sigma: float) -> int:
    """Tokens of the whole response, the stop token among them; log-normal."""
    share = (_number("length", seed) + 0.5) / 2**64
    return max(1, round(median_tokens * math.exp(sigma * NormalDist().inv_cdf(share))))


def logprob_at(version: int, content: int, position: int, token: int) -> float:
    """In (-3.01, -0.01]; another one for other weights: `content` is `content_of` them."""
    return -0.01 - 3 * _number("logprob", version, content, position, token) / 2**64


def content_of(reader: Reader) -> int:
    """A number that changes with any bit of the weights."""
    return zlib.crc32(reader.buffer)


def greedy_answer(reader: Reader) -> tuple[int, float]:
    """What a probe of the emulated model must hear: token 0, and as its logprob a function of all weights."""
    weights = np.frombuffer(reader.buffer, np.float32, EMULATED_SIZE, reader.entries[EMULATED_NAME].offset)
    return 0, -float(np.abs(weights).mean())


def verdict_text(prompt_ids: Sequence[int]) -> str:
    """A judge's critique with its verdict: yes for about half of all prompts."""
    word = "yes" if _number("verdict", zlib.crc32(pack(f"<{len(prompt_ids)}q", *prompt_ids))) % 2 else "no"
    return f"It was read with care. Verdict: {word}"


def choice_of(prompt_ids: Sequence[int], choices: Sequence[str]) -> str:
    return choices[_number("choice", zlib.crc32(pack(f"<{len(prompt_ids)}q", *prompt_ids))) % len(choices)]


def _number(purpose: str, *values: int) -> int:
    """64 random bits, always the same for the same arguments."""
    data = purpose.encode() + b"".join(value.to_bytes(16, "little", signed=True) for value in values)
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")
