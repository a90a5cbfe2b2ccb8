"""What the CUDA driver is asked for. There is none here: it is a list."""

from types import SimpleNamespace

import pytest
import torch

from pipeline.gps.store import Store
from stages.weights.pinned import pin

POLICY = "configs/quickstart/policy"


def test_each_slot_is_registered_once_and_a_refusal_is_said(
    store_name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[int, int, int]] = []

    def register(address: int, nbytes: int, flags: int) -> int:
        asked.append((address, nbytes, flags))
        return 0 if len(asked) < 3 else 801

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    store = Store.create(store_name, POLICY, "float32", 0)
    for _ in range(2):
        pin(store)
    assert [(address % 4096, nbytes, flags) for address, nbytes, flags in asked] == [
        (0, len(image), 8) for image in store.images()
    ]
    pin(Store.attach(store_name))
    assert f"{store_name} is not pinned: the driver answers 801" in capsys.readouterr().out
    store.unlink()


def test_what_is_dealt_among_nodes_is_left_alone(store_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: pytest.fail("its holes would get memory"))
    store = Store.create(store_name, POLICY, "float32", 0, 2, 2, [0])
    pin(store)
    store.unlink()
