"""/dev/shm belongs to everybody: what others put there is neither followed, nor trusted, nor removed."""

import fcntl
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.core.errors import WeightsUnavailable
from pipeline.gps.files import janitor
from pipeline.gps.store import Store

SHM = Path("/dev/shm")
NOBODY = 65534


@pytest.fixture
def prefix() -> Iterator[str]:
    """Of names that no other test has; what is left of them is removed."""
    prefix = f"pivot-{os.getuid()}-{uuid.uuid4().hex}-"
    yield prefix
    for path in SHM.glob(f"{prefix}*"):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def die(store: Store) -> None:
    """What the kernel does to a dead owner's lock."""
    fcntl.flock(store._meta_fd, fcntl.LOCK_UN)


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "thesis"
    path.write_text("dear to its owner")
    return path


def linked(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def dangling(path: Path, victim: Path) -> None:
    path.symlink_to(victim.with_name("absent"))


def folder(path: Path, victim: Path) -> None:
    path.mkdir()


def another_users(path: Path, victim: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a file away")
    path.write_bytes(b"\0" * 4096)
    path.chmod(0o666)
    os.chown(path, NOBODY, -1)


PLANTED = [linked, dangling, folder, another_users]
Plant = Callable[[Path, Path], None]


@pytest.mark.parametrize("plant", PLANTED)
@pytest.mark.parametrize("part", ["meta", "0", "1"])
def test_a_store_is_not_made_through_what_others_planted(prefix: str, victim: Path, plant: Plant, part: str) -> None:
    planted = SHM / f"{prefix}policy.{part}"
    plant(planted, victim)
    before = planted.lstat()
    with pytest.raises(FileExistsError):
        Store.create(f"{prefix}policy", "emulated", "float32", 0)
    assert victim.read_text() == "dear to its owner" and not victim.with_name("absent").exists()
    if part == "meta":  # to root the other names are its own; to a user the sticky bit of /dev/shm says whose they are
        assert planted.lstat() == before
    else:
        assert not (SHM / f"{prefix}policy.meta").exists()  # nothing of it is left


@pytest.mark.parametrize("plant", PLANTED)
@pytest.mark.parametrize("part", ["meta", "0"])
def test_a_store_is_not_read_through_what_others_planted(prefix: str, victim: Path, plant: Plant, part: str) -> None:
    store = Store.create(f"{prefix}policy", "emulated", "float32", 0)
    place = SHM / f"{prefix}policy.{part}"
    place.unlink()
    plant(place, victim)
    with pytest.raises((WeightsUnavailable, OSError, ValueError)):
        Store.attach(f"{prefix}policy")
    fresh = Store.create(f"{prefix}genrm", "emulated", "float32", 0)
    slot = SHM / f"{prefix}genrm.0"
    slot.unlink()
    plant(slot, victim)
    with pytest.raises((WeightsUnavailable, OSError, ValueError)), fresh.read(0, 0):
        pass
    assert victim.read_text() == "dear to its owner"
    place.rmdir() if plant is folder else place.unlink()
    slot.rmdir() if plant is folder else slot.unlink()
    store.unlink()
    fresh.unlink()


@pytest.mark.parametrize("plant", PLANTED)
def test_the_janitor_passes_by_what_is_not_its_users(prefix: str, victim: Path, plant: Plant) -> None:
    """And does its work on the rest: what others plant must not keep a run from starting."""
    planted = SHM / f"{prefix}a.meta"
    plant(planted, victim)
    abandoned = Store.create(f"{prefix}b", "emulated", "float32", 0)
    die(abandoned)
    assert janitor(prefix) == [f"{prefix}b"]
    assert planted.lstat() and victim.read_text() == "dear to its owner"
    assert [path.name for path in SHM.glob(f"{prefix}*")] == [planted.name]


def test_a_name_that_others_took_does_not_stop_the_janitor(prefix: str) -> None:
    abandoned = Store.create(f"{prefix}a", "emulated", "float32", 0)
    die(abandoned)
    (SHM / f"{prefix}a.0").unlink()
    (SHM / f"{prefix}a.0").mkdir()  # cannot be unlinked, as little as another user's file
    assert janitor(prefix) == [f"{prefix}a"]
    assert [path.name for path in SHM.glob(f"{prefix}*")] == [f"{prefix}a.0"]


def test_the_janitor_knows_users_apart_whose_numbers_begin_alike(prefix: str) -> None:
    store = Store.create(f"{prefix}x", "emulated", "float32", 0)
    die(store)
    assert janitor(prefix.rstrip("-")[:-1] + "-") == []
    assert janitor(prefix) == [f"{prefix}x"]
