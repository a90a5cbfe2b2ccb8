"""The image: canonical whatever the files look like, converted without torch exactly as torch would."""

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from pipeline.core.errors import ConfigError
from pipeline.gps.segment import fill, plan_image, read_header

ANY = np.arange(6, dtype=np.float32).reshape(2, 3)


def build(model: Path | str, dtype: str) -> bytes:
    image = plan_image(str(model), dtype)
    target = bytearray(image.nbytes)
    fill(image, memoryview(target))
    assert read_header(memoryview(target)) == image.entries
    return bytes(target)


def test_a_single_file_and_its_shards_give_the_same_image(tmp_path: Path) -> None:
    tensors = {"b.weight": ANY, "a.weight": ANY + 10, "c.weight": ANY[0] + 20}
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    safetensors.numpy.save_file(tensors, one / "model.safetensors")
    safetensors.numpy.save_file(
        {"c.weight": tensors["c.weight"], "a.weight": tensors["a.weight"]}, two / "x.safetensors"
    )
    safetensors.numpy.save_file({"b.weight": tensors["b.weight"], "junk": ANY}, two / "y.safetensors")
    weight_map = {"a.weight": "x.safetensors", "b.weight": "y.safetensors", "c.weight": "x.safetensors"}
    (two / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    image = build(one, "float32")
    assert image == build(two, "float32")
    read_back = safetensors.numpy.load(image)
    assert list(plan_image(str(one), "float32").entries) == sorted(tensors)
    assert all(np.array_equal(read_back[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16, torch.float16])
def test_conversion_equals_torch(tmp_path: Path, source: torch.dtype, target: torch.dtype) -> None:
    # All 16-bit patterns, or float32 values on both sides of each rounding border.
    patterns = torch.arange(65536, dtype=torch.int32)
    if source is torch.float32:
        high = (patterns << 16) | 0x7FFF
        tensor = torch.cat([high, high + 1, high + 2]).view(torch.float32)
    else:
        tensor = patterns.to(torch.int16).view(source)
    safetensors.torch.save_file({"weight": tensor}, tmp_path / "model.safetensors")

    read_back = safetensors.torch.load(build(tmp_path, str(target).removeprefix("torch.")))["weight"]
    expected = tensor.to(target)
    number = ~expected.isnan()
    assert torch.equal(expected.isnan(), read_back.isnan())
    bits = torch.int32 if target is torch.float32 else torch.int16
    assert torch.equal(expected[number].view(bits), read_back[number].view(bits))


def test_emulated_is_zeros() -> None:
    assert np.array_equal(safetensors.numpy.load(build("emulated", "bfloat16"))["weight"], np.zeros(1024, np.float32))


def test_what_is_refused_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no \*\.safetensors"):
        plan_image(str(tmp_path), "float32")
    file = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"steps": np.arange(3)}, file)
    with pytest.raises(ConfigError, match="'steps' has dtype I64"):
        plan_image(str(tmp_path), "float32")
    safetensors.numpy.save_file({"a": ANY}, file)
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ConfigError, match="cut short"):
        plan_image(str(tmp_path), "float32")
    file.write_bytes(b"nonsense, not safetensors")
    with pytest.raises(ConfigError, match="not a readable safetensors file"):
        plan_image(str(tmp_path), "float32")
    safetensors.numpy.save_file({"a": ANY}, file)
    safetensors.numpy.save_file({"a": ANY}, tmp_path / "other.safetensors")
    with pytest.raises(ConfigError, match="in both"):
        plan_image(str(tmp_path), "float32")
