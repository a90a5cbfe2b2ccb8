"""What an emulated worker holds while it is awake, as others see it."""

import os
from pathlib import Path

import pytest

from pipeline.memory import private_bytes
from stages.ballast import Ballast

MIB = 1 << 20


def devices() -> list[str]:
    """Of all that this process has."""
    lines = Path(f"/proc/{os.getpid()}/maps").read_text().splitlines()
    return [line.partition("memfd:gpus:")[2] for line in lines if "memfd:gpus:" in line]


def test_its_devices_and_bytes_are_seen_while_it_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    before, files = private_bytes(), len(os.listdir("/proc/self/fd"))
    ballast = Ballast(32 * MIB)
    assert devices() == ["GPU-a,GPU-b (deleted)"]
    assert private_bytes() - before > 30 * MIB
    ballast.close()
    assert devices() == [] and private_bytes() - before < 8 * MIB
    assert len(os.listdir("/proc/self/fd")) == files


def test_without_devices_it_has_a_name_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    ballast = Ballast(0)
    assert devices() == [" (deleted)"]
    ballast.close()
