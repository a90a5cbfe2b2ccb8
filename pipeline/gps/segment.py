"""A segment: all weights of one model version as one safetensors image, whatever files the model came in.

The image is canonical: the checkpoint's own (HF) names in sorted order, one dtype, offsets fixed by names and shapes
alone, so two versions of a model differ only in their tensor bytes and a slot's header is written once.
Needs neither torch nor, where nothing has to be converted, numpy.
"""

import json
import math
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.core.errors import ConfigError

EMULATED = "emulated"
"""As a model's path: no files; the image holds one float32 tensor of zeros."""

EMULATED_NAME = "weight"
EMULATED_SIZE = 1024

ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
_SAFETENSORS_NAME = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_ALIGN = 64
_CHUNK_BYTES = 64 << 20
_MAX_HEADER_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of an image. `offset` counts from the start of the image; dtype is "F32", "BF16" or "F16"."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Source:
    """Where one tensor lies in a model's files: `entry.offset` counts from the start of `file`."""

    file: Path
    entry: Entry


@dataclass(frozen=True, slots=True)
class Image:
    """The plan of an image: `header` is its first bytes, `entries` say where each tensor goes."""

    header: bytes
    entries: dict[str, Entry]
    sources: dict[str, Source]
    nbytes: int


def plan_image(model_path: str, dtype: str) -> Image:
    """The image of the model in folder `model_path` (or "emulated"), stored as `dtype` (a config Dtype).

    Raises ConfigError where the folder has no weights, a tensor's dtype cannot be converted, or files contradict.
    """
    if model_path == EMULATED:
        return _layout({EMULATED_NAME: (EMULATED_SIZE,)}, "F32", {})
    sources = _sources(Path(model_path))
    for name, source in sources.items():
        if source.entry.dtype not in ITEM_BYTES:
            raise ConfigError(
                f"{source.file}: tensor {name!r} has dtype {source.entry.dtype}; valid: {', '.join(ITEM_BYTES)}"
            )
    return _layout({n: s.entry.shape for n, s in sources.items()}, _SAFETENSORS_NAME[dtype], sources)


def fill(image: Image, target: memoryview, names: Collection[str] | None = None) -> None:
    """Write header and tensors (all, or those of `names`) into `target` (at least `image.nbytes`), converting to the
    image's dtype."""
    target[: len(image.header)] = image.header
    for name, source in image.sources.items():
        if names is not None and name not in names:
            continue
        entry = image.entries[name]
        out = target[entry.offset : entry.offset + entry.nbytes]
        with open(source.file, "rb", buffering=0) as file:
            if source.entry.dtype == entry.dtype:
                _read_into(file.fileno(), out, source.entry.offset, source.file)
            else:
                _convert(file.fileno(), out, source, entry.dtype)


def read_header(image: memoryview) -> dict[str, Entry]:
    """The entries of an image, in its own order. Raises ValueError if the bytes are no safetensors header."""
    size = int.from_bytes(image[:8], "little")
    if not 0 < size <= min(_MAX_HEADER_BYTES, len(image) - 8):
        raise ValueError(f"no safetensors header: its length reads {size}")
    return _parse(bytes(image[8 : 8 + size]), 8 + size)


def _layout(shapes: dict[str, tuple[int, ...]], dtype: str, sources: dict[str, Source]) -> Image:
    table: dict[str, dict[str, object]] = {}
    at = 0
    for name in sorted(shapes):
        nbytes = math.prod(shapes[name]) * ITEM_BYTES[dtype]
        table[name] = {"dtype": dtype, "shape": list(shapes[name]), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGN)  # the format allows trailing spaces: tensors start aligned
    header = len(text).to_bytes(8, "little") + text
    return Image(header=header, entries=_parse(text, len(header)), sources=sources, nbytes=len(header) + at)


def _parse(text: bytes, start: int) -> dict[str, Entry]:
    table = json.loads(text)
    table.pop("__metadata__", None)
    return {
        name: Entry(row["dtype"], tuple(row["shape"]), start + row["data_offsets"][0], _length(row["data_offsets"]))
        for name, row in table.items()
    }


def _length(offsets: list[int]) -> int:
    return offsets[1] - offsets[0]


def _sources(folder: Path) -> dict[str, Source]:
    found: dict[str, Source] = {}
    for file, wanted in _files(folder):
        for name, entry in _file_entries(file).items():
            if wanted is not None and name not in wanted:
                continue
            if name in found:
                raise ConfigError(f"{folder}: tensor {name!r} is in both {found[name].file.name} and {file.name}")
            found[name] = Source(file, entry)
        if wanted is not None and (lost := wanted - found.keys()):
            raise ConfigError(f"{file}: the index promises {sorted(lost)[:3]} there")
    return found


def _files(folder: Path) -> Iterator[tuple[Path, set[str] | None]]:
    """The weight files; with the names to take from each where the folder has an index."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        for file in sorted(set(weight_map.values())):
            yield folder / file, {name for name, of in weight_map.items() if of == file}
        return
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} has no *.safetensors; a model is a folder with config.json and safetensors files")
    yield from ((file, None) for file in files)


def _file_entries(path: Path) -> dict[str, Entry]:
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= min(_MAX_HEADER_BYTES, size - 8):
                raise ValueError(f"its header's length reads {length}, the file has {size} bytes")
            entries = _parse(file.read(length), 8 + length)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a readable safetensors file: {error}") from error
    for name, entry in entries.items():
        if entry.offset + entry.nbytes > size:
            raise ConfigError(f"{path} is cut short: tensor {name!r} ends past its {size} bytes")
    return entries


def _read_into(fd: int, out: memoryview, offset: int, path: Path) -> None:
    done = 0
    while done < len(out):
        count = os.preadv(fd, [out[done : done + _CHUNK_BYTES]], offset + done)
        if count == 0:
            raise ConfigError(f"{path} ended {len(out) - done} bytes early")
        done += count


def _convert(fd: int, out: memoryview, source: Source, dtype: str) -> None:
    """Element by element through float32, rounding to nearest even; in chunks, so memory stays bounded."""
    import numpy as np

    from_bytes, to_bytes = ITEM_BYTES[source.entry.dtype], ITEM_BYTES[dtype]
    count = source.entry.nbytes // from_bytes
    step = _CHUNK_BYTES // 4
    for first in range(0, count, step):
        n = min(step, count - first)
        raw = memoryview(bytearray(n * from_bytes))
        _read_into(fd, raw, source.entry.offset + first * from_bytes, source.file)
        match source.entry.dtype:
            case "F32":
                wide = np.frombuffer(raw, np.float32)
            case "F16":
                wide = np.frombuffer(raw, np.float16).astype(np.float32)
            case _:
                wide = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
        match dtype:
            case "F32":
                narrow = wide
            case "F16":
                with np.errstate(over="ignore"):  # out of range becomes inf, as everywhere else
                    narrow = wide.astype(np.float16)
            case _:
                bits = wide.view(np.uint32)
                rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
                # Rounding may carry a NaN's mantissa over; it stays a NaN.
                narrow = np.where(np.isnan(wide), np.uint32(0x7FC0), rounded).astype(np.uint16)
        out[first * to_bytes : (first + n) * to_bytes] = narrow.tobytes()
