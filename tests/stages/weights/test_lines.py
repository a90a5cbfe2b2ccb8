"""Lines between two ends, here the two threads of a process, and one of NCCL where there is a GPU."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed import FileStore, HashStore

from stages.weights.lines import GlooLine, Line, StagedLine, gloo_group, nccl_group
from tests.contracts.lines import IMAGES, PIECE_BYTES, check_image, check_line

HOST = "127.0.0.1"


def direct(rendezvous: Path, rank: int, limit_s: float) -> Line:
    return GlooLine(FileStore(str(rendezvous), 2), rank, HOST, limit_s)


def staged(rendezvous: Path, rank: int, limit_s: float) -> Line:
    group = gloo_group(FileStore(str(rendezvous), 2), rank, HOST, limit_s)
    return StagedLine(group, torch.device("cpu"), PIECE_BYTES)


def nccl(rendezvous: Path, rank: int, limit_s: float) -> Line:
    """Each end has a GPU of its own."""
    group = nccl_group(FileStore(str(rendezvous), 2), rank, 2, limit_s)
    return StagedLine(group, torch.device(f"cuda:{rank}"), PIECE_BYTES)


Make = Callable[[Path, int, float], Line]
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two CUDA devices")


@pytest.fixture(params=[direct, staged, pytest.param(nccl, marks=[pytest.mark.gpu, TWO_GPUS])])
def make(request: pytest.FixtureRequest) -> Make:
    return request.param


@pytest.fixture
def ends(make: Make, tmp_path: Path) -> Iterator[tuple[Line, Line]]:
    with ThreadPoolExecutor(2) as pool:
        yield tuple(pool.map(lambda rank: make(tmp_path / "group", rank, 10.0), (0, 1)))


def both(first: Callable[[], object], second: Callable[[], object]) -> list[object]:
    with ThreadPoolExecutor(2) as pool:
        return [future.result() for future in [pool.submit(first), pool.submit(second)]]


def between(sender: Line, receiver: Line) -> Callable[[Sequence[Tensor], Sequence[Tensor]], None]:
    def carry(pieces: Sequence[Tensor], arrived: Sequence[Tensor]) -> None:
        under_way, there = both(lambda: list(sender.send(pieces)), lambda: list(receiver.receive(arrived)))
        assert list(map(id, under_way)) == list(map(id, pieces)) and list(map(id, there)) == list(map(id, arrived))

    return carry


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_arrives_bit_for_bit(ends: tuple[Line, Line], name: str) -> None:
    check_image(between(*ends), name)


def test_a_line_carries_one_image_after_the_other_in_both_directions(ends: tuple[Line, Line]) -> None:
    check_line(between(*ends))
    check_line(between(*reversed(ends)))


def test_words_are_heard_as_they_were_said_before_and_after_pieces(ends: tuple[Line, Line]) -> None:
    sender, receiver = ends
    pieces = [torch.arange(100, dtype=torch.uint8)] * 3

    def tell() -> Tensor:
        sender.say(torch.tensor([1, -(2**62)]))
        answer = sender.hear(torch.empty(1, dtype=torch.int64))
        for _ in sender.send(pieces):
            pass
        sender.say(torch.tensor([3]))
        return answer

    def listen() -> list[Tensor]:
        first = receiver.hear(torch.empty(2, dtype=torch.int64))
        receiver.say(torch.tensor([7]))
        arrived = list(receiver.receive([torch.zeros(100, dtype=torch.uint8) for _ in pieces]))
        return [first, receiver.hear(torch.empty(1, dtype=torch.int64)), *arrived]

    answer, (first, last, *arrived) = both(tell, listen)
    assert answer.tolist() == [7] and first.tolist() == [1, -(2**62)] and last.tolist() == [3]
    assert all(map(torch.equal, arrived, pieces))


def test_a_piece_is_there_before_the_last_one_was_sent(ends: tuple[Line, Line]) -> None:
    """The receiver works on one while the next arrives."""
    sender, receiver = ends
    pieces = [torch.full((PIECE_BYTES,), i, dtype=torch.uint8) for i in range(6)]
    seen = threading.Event()

    def tell() -> None:
        for i, _ in enumerate(sender.send(pieces)):
            if i == 4:
                assert seen.wait(10)

    def listen() -> None:
        for piece_C in receiver.receive([torch.zeros_like(piece_C) for piece_C in pieces]):
            assert len(piece_C.unique()) == 1
            seen.set()

    both(tell, listen)


def test_an_end_that_is_alone_fails_within_its_limit(make: Make, tmp_path: Path) -> None:
    if make is nccl:
        pytest.skip("NCCL ends no wait; the agent's limit on a move does")
    with pytest.raises(RuntimeError):
        make(tmp_path / "group", 0, 0.5).hear(torch.empty(1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_nccl_carries_to_itself() -> None:
    group = nccl_group(HashStore(), 0, 1, 60.0)
    check_line(StagedLine(group, torch.device("cuda:0"), PIECE_BYTES).loop)
