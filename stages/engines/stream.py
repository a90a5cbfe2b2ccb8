"""What the emulated engine says, as pure functions of seeds, positions and weights: nothing else plays a part, so a
sequence that was cut and continued anywhere is the sequence that was not.

The stream of a seed has a token at every absolute position. Where a prompt ends with the tokens that the stream has
at these positions, they are what was generated before: `begin` finds the place, and lengths count from there.
"""

import itertools
import math
import zlib
from collections.abc import Collection, Sequence
from hashlib import blake2b
from statistics import NormalDist
from struct import pack

import numpy as np

from pipeline.gps.layout import whole
from pipeline.gps.ranges import byte_ranges
from pipeline.gps.segment import EMULATED_NAME, EMULATED_SIZE
from pipeline.gps.store import Reader
from pipeline.gps.wants import Want

Parts = Sequence[tuple[float, float, float]]
_MOST_DRAWS = 1000
_CRITIQUE = "It was read with care, line by line. "
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


def length_of(seed: int, parts: Parts, longer: float = 1.0, more_than: int = 0) -> int:
    """Tokens of the whole response, the stop token among them. `parts`: share, median and sigma of each part of a
    log-normal mixture. `more_than`: it is known to have so many, and more: drawn until it has."""
    for attempt in range(_MOST_DRAWS if more_than else 1):
        drawn = _draw(seed, attempt, parts)
        length = max(1, round(longer * drawn))
        if length > more_than:
            return length
    return more_than + 1


def _draw(seed: int, attempt: int, parts: Parts) -> float:
    chosen = parts[0]
    if len(parts) > 1:
        share = (_number("part", seed, attempt) + 0.5) / 2**64
        ends = itertools.accumulate(part[0] for part in parts)
        chosen = next((part for part, end in zip(parts, ends, strict=True) if share < end), parts[-1])
    _, median_tokens, sigma = chosen
    quantile = (_number("length", seed, attempt) + 0.5) / 2**64
    return median_tokens * math.exp(sigma * NormalDist().inv_cdf(quantile))


def logprob_at(version: int, content: int, position: int, token: int) -> float:
    """In (-3.01, -0.01]; another one for other weights: `content` is `content_of` them."""
    return -0.01 - 3 * _number("logprob", version, content, position, token) / 2**64


def content_of(reader: Reader) -> int:
    """A number that changes with any bit of the weights."""
    return zlib.crc32(_image(reader))


def greedy_answer(reader: Reader) -> tuple[int, float]:
    """What a probe of the emulated model must hear: token 0, and as its logprob a function of all weights."""
    weights = np.frombuffer(_image(reader), np.float32, EMULATED_SIZE, reader.entries[EMULATED_NAME].offset)
    return 0, -float(np.abs(weights).mean())


def _image(reader: Reader) -> memoryview | bytearray:
    """All of it, also where other nodes hold tensors of it."""
    if reader.is_whole:
        return reader.buffer
    image = bytearray(len(reader.buffer))
    first = min(entry.offset for entry in reader.entries.values())
    for at, nbytes in [(0, first), *((entry.offset, entry.nbytes) for entry in reader.here.values())]:
        image[at : at + nbytes] = reader.buffer[at : at + nbytes]
    wants = [Want(name, whole(e.shape)) for name, e in reader.entries.items() if name not in reader.here]
    for packed, data in reader.fetch(wants):
        at, _ = next(byte_ranges(reader.entries[packed.want.name], packed.want.box))  # rows: in one run
        image[at : at + packed.nbytes] = data
    return image


def verdict_text(prompt_ids: Sequence[int], parts: Parts = (), longest: int = 0) -> str:
    """A judge's critique with its verdict: yes for about half of all prompts. With `parts`, as long as they say, but at
    most `longest` tokens, and never without its verdict."""
    content = zlib.crc32(pack(f"<{len(prompt_ids)}q", *prompt_ids))
    verdict = f" Verdict: {'yes' if _number('verdict', content) % 2 else 'no'}"
    if not parts:
        return f"It was read with care.{verdict}"
    num_more = min(length_of(content, parts), longest) - len(verdict) - 1  # the stop token
    return (_CRITIQUE * (max(0, num_more) // len(_CRITIQUE) + 1))[: max(0, num_more)] + verdict


def choice_of(prompt_ids: Sequence[int], choices: Sequence[str]) -> str:
    return choices[_number("choice", zlib.crc32(pack(f"<{len(prompt_ids)}q", *prompt_ids))) % len(choices)]


def _number(purpose: str, *values: int) -> int:
    """64 random bits, always the same for the same arguments."""
    data = purpose.encode() + b"".join(value.to_bytes(16, "little", signed=True) for value in values)
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")
