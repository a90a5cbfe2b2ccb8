"""One node's store: nobody reads a part of a version, and a reader's or writer's death harms nothing."""

import os
import pickle
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from pipeline.core.errors import RunError, WeightsUnavailable
from pipeline.gps.files import janitor
from pipeline.gps.store import Reader, Store, Writer

READ_AND_WAIT = """
import sys, time
from pipeline.gps.store import Store
reader = Store.attach(sys.argv[1]).read(int(sys.argv[2]), 1)
print("held", flush=True)
time.sleep(600)
"""
WRITE_AND_WAIT = """
import sys, time
from pipeline.gps.store import Store
with Store.attach(sys.argv[1]).write(int(sys.argv[2]), 1) as writer:
    writer.buffer[-8:] = b"halfways"
    print("held", flush=True)
    time.sleep(600)
"""
OWN_AND_WAIT = """
import sys, time
from pipeline.gps.store import Store
store = Store.create(sys.argv[1], "emulated", "float32", 0)
print("held", flush=True)
time.sleep(600)
"""


def values(held: Reader | Writer) -> np.ndarray:
    return np.frombuffer(held.buffer, np.float32, 1024, held.entries["weight"].offset)


def publish(store: Store, version: int) -> None:
    with store.write(version, 1) as writer:
        values(writer)[:] = version
    store.seal(version)


def start(code: str, *arguments: object) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def end(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


@pytest.fixture
def store(store_name: str) -> Iterator[Store]:
    store = Store.create(store_name, "emulated", "float32", 0)
    yield store
    store.unlink()


def test_versions_follow_each_other_through_two_slots(store: Store) -> None:
    for version in (1, 2, 3):
        publish(store, version)
        assert store.current() == version
        with Store.attach(store.name).read(version, 0) as reader, store.read(version, 0) as second:
            assert (values(reader) == version).all() and (values(second) == version).all()
    with store.read(2, 0) as reader:  # the version before lasts until it is written over
        assert (values(reader) == 2).all()
    with pytest.raises(WeightsUnavailable, match="does not hold version 1: slot 1 is WRITTEN with version 3"):
        store.read(1, 0)


def test_a_store_may_begin_at_any_version(store_name: str) -> None:
    store = Store.create(store_name, "emulated", "float32", 7)
    assert store.current() == 7
    publish(store, 8)
    assert store.read(8, 0).version == 8
    store.unlink()


def test_a_version_is_invisible_until_it_is_sealed(store: Store) -> None:
    with store.write(1, 0) as writer:
        values(writer)[:] = 1
    with pytest.raises(WeightsUnavailable, match="visible version is 0"):
        store.read(1, 0)
    store.seal(1)
    store.seal(1)  # told twice: nothing happens
    assert store.current() == 1
    with pytest.raises(WeightsUnavailable, match="version 3 cannot be sealed: its slot is WRITTEN with version 1"):
        store.seal(3)


def test_the_visible_version_cannot_be_written(store: Store, store_name: str) -> None:
    publish(store, 1)
    for version in (0, 1, 3):
        with pytest.raises(ValueError, match="cannot be written"):
            store.write(version, 0)
    single = Store.create(store_name + "-genrm", "emulated", "float32", 0, slots=1)
    assert single.num_slots == 1
    with pytest.raises(ValueError, match="cannot be written"):
        single.write(1, 0)
    single.unlink()


def test_a_hidden_store_shows_nothing_and_takes_any_version(store: Store) -> None:
    publish(store, 1)
    publish(store, 2)
    held = store.read(1, 0)
    for version in (2, 1, 0, 7):
        store.hide()
        assert store.current() == Store.attach(store.name).current() == -1
        for older in range(8):
            with pytest.raises(WeightsUnavailable, match=r"EMPTY with version \d, no version is visible"):
                store.read(older, 0, is_sealed=False)
            with pytest.raises(WeightsUnavailable, match="cannot be sealed"):
                store.seal(older)
        assert version != 2 or (values(held) == 1).all()
        held.close()
        publish(store, version)
        assert store.current() == version
        with Store.attach(store.name).read(version, 0) as reader:
            assert (values(reader) == version).all()


CONFINED = """
import sys
from pipeline.gps.files import janitor
from pipeline.gps.store import Store, confine
own, other = sys.argv[1:]
confine(own.removesuffix("policy"))
Store.attach(own).read(0, 1).close()
for act in (Store.attach, lambda name: Store.create(name, "emulated", "float32", 0)):
    for name in (other, other + "-new", own.replace("-policy", "1-policy")):
        try:
            act(name)
        except PermissionError as error:
            assert f"{name} is of another node: this process may open {own.removesuffix('policy')}* only" in str(error)
        else:
            raise AssertionError(name)
print(janitor(other), flush=True)
"""


def test_a_confined_process_opens_only_the_stores_of_its_node(store: Store) -> None:
    other = store.name.replace("-n0-", "-n1-")
    assert other != store.name
    end(start(OWN_AND_WAIT, other))
    done = subprocess.run(
        [sys.executable, "-c", CONFINED, store.name, other],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert (done.returncode, done.stdout) == (0, f"[{other!r}]\n"), done.stderr


def test_a_failed_write_leaves_the_slot_invalid_and_current_valid(store: Store) -> None:
    with pytest.raises(ZeroDivisionError), store.write(1, 0):
        raise ZeroDivisionError
    with pytest.raises(WeightsUnavailable, match="WRITING"):
        store.seal(1)
    assert (values(store.read(0, 0)) == 0).all()
    publish(store, 1)
    assert (values(store.read(1, 0)) == 1).all()


def test_a_killed_writer_leaves_the_slot_invalid_and_current_valid(store: Store) -> None:
    writer = start(WRITE_AND_WAIT, store.name, 1)
    with pytest.raises(WeightsUnavailable, match=rf"writing version 1: .*held by process {writer.pid} for 0\.05 s"):
        store.write(1, 0.05)
    end(writer)
    with pytest.raises(WeightsUnavailable, match="slot is WRITING with version 1"):
        store.seal(1)
    assert store.current() == 0 and (values(store.read(0, 0)) == 0).all()
    publish(store, 1)
    assert (values(store.read(1, 0)) == 1).all()


def test_a_killed_reader_blocks_nobody_and_harms_nothing(store: Store) -> None:
    publish(store, 1)
    reader = start(READ_AND_WAIT, store.name, 0)
    with pytest.raises(WeightsUnavailable, match=f"held by process {reader.pid}"):
        store.write(2, 0.05)
    end(reader)
    publish(store, 2)  # its lock went with it, the slot did not
    assert (values(store.read(2, 0)) == 2).all()
    assert (values(Store.attach(store.name).read(1, 0)) == 1).all()


def test_a_closed_reader_frees_the_slot_although_its_views_live(store: Store) -> None:
    publish(store, 1)
    reader = store.read(0, 0)
    view = values(reader)
    reader.close()
    reader.close()
    publish(store, 2)
    assert view[0] == 2  # still mapped, no longer a promise
    with pytest.raises(ValueError, match="was closed"):
        _ = reader.buffer


def test_readers_cannot_write(store: Store) -> None:
    with store.read(0, 0) as reader, pytest.raises(TypeError, match="read-only"):
        reader.buffer[0] = 1


def test_only_this_user_sees_it_and_the_name_is_taken(store: Store) -> None:
    for part in ("meta", "0", "1"):
        assert stat.S_IMODE(os.stat(f"/dev/shm/{store.name}.{part}").st_mode) == 0o600
    with pytest.raises(FileExistsError):
        Store.create(store.name, "emulated", "float32", 0)
    assert Store.attach(store.name).current() == 0
    with pytest.raises(ValueError, match="no name of a weight store"):
        Store.attach("../tmp/policy")


def test_attaching_to_nothing_or_through_a_link(store: Store) -> None:
    with pytest.raises(WeightsUnavailable, match="no weight store"):
        Store.attach(store.name + "-absent")
    link = f"/dev/shm/{store.name}-link.meta"
    os.symlink(f"/dev/shm/{store.name}.meta", link)
    with pytest.raises(WeightsUnavailable, match="no weight store"):
        Store.attach(store.name + "-link")
    os.unlink(link)


def test_the_janitor_removes_only_what_has_no_owner(store: Store) -> None:
    prefix = store.name.removesuffix("-policy")
    owner = start(OWN_AND_WAIT, f"{prefix}-other")
    reader = Store.attach(f"{prefix}-other").read(0, 0)
    assert janitor(prefix) == []
    end(owner)
    assert janitor(prefix) == [f"{prefix}-other"]
    assert (values(reader) == 0).all()  # who has it open keeps what it holds
    assert sorted(f for f in os.listdir("/dev/shm") if f.startswith(prefix)) == sorted(
        f"{store.name}.{part}" for part in ("0", "1", "meta")
    )
    with pytest.raises(WeightsUnavailable):
        Store.attach(f"{prefix}-other")


def test_too_large_for_shared_memory_is_said_with_numbers(store_name: str, tmp_path: Path) -> None:
    free = os.statvfs("/dev/shm")
    elements = free.f_blocks * free.f_frsize // 4 + 1
    header = f'{{"a":{{"dtype":"F32","shape":[{elements}],"data_offsets":[0,{elements * 4}]}}}}'.encode()
    with open(tmp_path / "model.safetensors", "wb") as file:  # sparse: takes no room on disk
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + elements * 4)
    with pytest.raises(RunError, match=r"needs \d+ bytes, but /dev/shm has \d+ left"):
        Store.create(store_name, str(tmp_path), "float32", 0)
    assert not [f for f in os.listdir("/dev/shm") if f.startswith(store_name)]


def test_page_tables_are_made_ahead_and_given_up(store_name: str, tmp_path: Path) -> None:
    num_bytes = 40 << 20  # more than one piece

    def mapped() -> int:
        """Pages of shared memory in this process's page tables, in bytes."""
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssShmem:"))

    safetensors.numpy.save_file({"weight": np.full(num_bytes // 4, 7, np.float32)}, tmp_path / "model.safetensors")
    store = Store.create(store_name, str(tmp_path), "float32", 0, slots=1)
    try:
        store.forget_pages()
        nothing = mapped()
        with store.read(0, 1.0) as reader:
            reader.populate()
            assert mapped() - nothing >= num_bytes
        assert mapped() - nothing >= num_bytes, "whatever is held"
        store.forget_pages()
        assert mapped() - nothing < 1 << 20
        with store.read(0, 1.0) as reader:
            assert set(values(reader)) == {7}
    finally:
        store.unlink()


JOIN_AND_WAIT = """
import sys, time
from pipeline.gps.store import Store
joined = Store.attach(sys.argv[1]).join(int(sys.argv[2]), 1)
joined.buffer[-8:] = b"anotherX"
print("held", flush=True)
time.sleep(60)
"""


def test_others_write_along_when_the_writer_shares(store: Store) -> None:
    with store.write(1, 0) as writer:
        with pytest.raises(WeightsUnavailable, match=r"joining the writer of version 1: .* was held by"):
            store.join(1, 0)
        writer.share()
        values(writer)[:512] = 1
        with Store.attach(store.name).join(1, 0) as joined:
            np.frombuffer(joined.buffer, np.float32, 1024, joined.entries["weight"].offset)[512:] = 2
        with pytest.raises(WeightsUnavailable, match="nobody is writing version 3"):
            store.join(3, 0)
        with pytest.raises(WeightsUnavailable, match="WRITING with version 1"):
            store.read(1, 0, is_sealed=False)
    store.seal(1)
    assert set(values(store.read(1, 0))[:512]) == {1} and set(values(store.read(1, 0))[512:]) == {2}
    with pytest.raises(WeightsUnavailable, match="nobody is writing version 1"):
        store.join(1, 0)


def test_who_joined_keeps_the_slot_when_the_writer_is_gone(store: Store) -> None:
    """Else it might write into what another writer makes of it."""
    with pytest.raises(ZeroDivisionError), store.write(1, 0) as writer:
        writer.share()
        other = start(JOIN_AND_WAIT, store.name, 1)
        raise ZeroDivisionError
    with pytest.raises(WeightsUnavailable, match=f"held by process {other.pid}"):
        store.write(1, 0.05)
    end(other)
    publish(store, 1)


def test_what_is_written_later_is_added_and_a_failure_takes_nothing_away(store: Store) -> None:
    with store.write_more(1, 0) as writer:
        values(writer)[:512] = 1
    with pytest.raises(ZeroDivisionError), store.write_more(1, 0) as writer:
        raise ZeroDivisionError
    with store.write_more(1, 0) as writer:
        with pytest.raises(WeightsUnavailable, match="was held by"):
            store.read(1, 0, is_sealed=False)
        values(writer)[512:] = 2
    store.seal(1)
    with store.read(1, 0) as reader:
        assert set(values(reader)[:512]) == {1} and set(values(reader)[512:]) == {2}
    with pytest.raises(ValueError, match="cannot be written beside the visible version 1"):
        store.write_more(1, 0)
    with store.write_more(2, 0) as writer:  # nothing of it is there: as any other write
        values(writer)[:] = 3
    with pytest.raises(ZeroDivisionError), store.write_more(4, 0):
        raise ZeroDivisionError
    with pytest.raises(WeightsUnavailable, match="WRITING with version 4"):
        store.seal(4)


def test_a_store_is_attached_where_it_is_sent(store: Store) -> None:
    publish(store, 1)
    sent = pickle.loads(pickle.dumps(store))
    assert sent.name == store.name and (values(sent.read(1, 0)) == 1).all()
