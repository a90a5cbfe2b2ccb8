"""Versioned weights of one model in one node's shared memory.

Files under /dev/shm, all 0600: `<name>.meta`, and one `<name>.<slot>` per slot. A slot's bytes are a safetensors
image, and the same file is the slot's lock: readers hold `flock` shared, the writer exclusive. The kernel frees the
lock of a process that dies, so a dead reader blocks nobody and harms nothing. Version v lives in slot v % slots;
with two slots the visible version is never written over. With one slot a store is immutable.

    EMPTY ▶ WRITING(v) ▶ WRITTEN(v) ▶ visible (`current` = v)      a writer that dies leaves WRITING: nobody reads it

`.meta` is a page of 64-bit words: `current` (one aligned store makes a version visible; the word is one more than
that, and 0 where none is), then version and state of each slot. The process that created the store holds a shared lock
on it for as long as it lives: that is how the janitor tells a store that is in use from what a killed run left.

A lock belongs to an open file, which a fork shares: never fork while a Reader or Writer is open.

Nodes of a local run share /dev/shm; `confine` keeps a process to the stores of its own node all the same.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import re
from collections.abc import Callable
from enum import IntEnum
from types import TracebackType
from typing import Self

from pipeline.core.errors import RunError, WeightsUnavailable
from pipeline.gps.lock import Lock, open_own
from pipeline.gps.room import META_BYTES
from pipeline.gps.segment import Entry, fill, plan_image, read_header

SHM = "/dev/shm"
_MAGIC = 0x32535047_50564954
_CURRENT, _FORMAT, _NUM_SLOTS = 0, 1, 2
_MADV_POPULATE_READ = 22
_POPULATED_BYTES = 16 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_own_prefix = ""


def confine(prefix: str) -> None:
    """From now on this process can create and attach only stores whose names begin with `prefix`: those of its node.

    What passes here then also passes where each node has a memory of its own. The janitor is not bound by it.
    """
    global _own_prefix
    _own_prefix = prefix


class SlotState(IntEnum):
    EMPTY = 0
    WRITING = 1
    WRITTEN = 2


class _Slot:
    """One slot held open: what readers and writers share."""

    def __init__(self, version: int, entries: dict[str, Entry], mapped: mmap.mmap, lock: Lock) -> None:
        self.version = version
        self.entries = entries
        self._mapped = mapped
        self._lock: Lock | None = lock

    @property
    def buffer(self) -> memoryview:
        """The whole image; `entries` hold offsets into it. Valid while the slot is held: later it is another
        version's."""
        if self._lock is None:
            raise ValueError(f"version {self.version} was closed")
        return memoryview(self._mapped)

    def close(self) -> None:
        """Idempotent. Views of `buffer` stay safe to touch, but no longer promise this version."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Self:
        return self


class Reader(_Slot):
    """A version held for reading: `version`, `entries`, `buffer` (read-only). A context manager."""

    def populate(self) -> None:
        """Make the page tables of this process for it, so that who copies it later only copies. They last until
        `Store.forget_pages`, whatever is held. In pieces: the call keeps the interpreter to itself."""
        for start in range(0, len(self._mapped), _POPULATED_BYTES):
            with contextlib.suppress(OSError):  # a kernel before 5.14
                self._mapped.madvise(_MADV_POPULATE_READ, start, min(_POPULATED_BYTES, len(self._mapped) - start))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class Writer(_Slot):
    """A slot held for writing: `version`, `entries`, `buffer`. A context manager: only a clean exit makes the version
    one that can be sealed."""

    def __init__(
        self, version: int, entries: dict[str, Entry], mapped: mmap.mmap, lock: Lock, words: memoryview, at: int
    ) -> None:
        super().__init__(version, entries, mapped, lock)
        self._words, self._at = words, at
        words[at + 1] = SlotState.WRITING
        words[at] = version

    def share(self) -> None:
        """From now on others may join, and write their parts of the same version. Who shares waits for them before a
        clean exit; while one of them lives, also after the death of all others, no other writer gets the slot."""
        assert self._lock is not None
        self._lock.share()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self._words[self._at + 1] = SlotState.WRITTEN
        self.close()


class Joined(_Slot):
    """A slot held for writing parts of it, which others write, too, or have written. A context manager."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class Store:
    """One model's store on this node: made by `create` (the owner) or `attach` (everybody else)."""

    def __init__(self, name: str, meta_fd: int) -> None:
        self.name = name
        self._meta_fd = meta_fd  # held open: in the owner it carries the lock that says "in use"
        self._words = memoryview(mmap.mmap(meta_fd, META_BYTES)).cast("Q")
        self._maps: dict[tuple[int, bool], mmap.mmap] = {}
        self._entries: dict[str, Entry] = {}

    @classmethod
    def create(cls, name: str, model_path: str, dtype: str, version: int, slots: int = 2) -> "Store":
        """Put the model into shared memory as `version`, visible at once; all memory is taken now.

        `model_path` is a folder with safetensors files, or "emulated". The caller becomes the owner: it keeps the
        returned store and unlinks it at the end. Raises ConfigError for a bad model, RunError if memory is short,
        FileExistsError if the name is taken, PermissionError if it is not of this process's node.
        """
        _require_own(name)
        image = plan_image(model_path, dtype)
        store = cls(name, _claim(_path(name, "meta")))
        try:
            store._words[_NUM_SLOTS] = slots
            for slot in range(slots):
                fd = _create(_path(name, str(slot)), image.nbytes)
                os.pwrite(fd, image.header, 0)
                os.close(fd)
            at = store._word_of(version)
            store._words[at] = version
            fill(image, memoryview(store._map(version % slots, writable=True)))
            store._words[at + 1] = SlotState.WRITTEN
            store._words[_CURRENT] = version + 1
            store._words[_FORMAT] = _MAGIC  # last: before it, attach fails
        except BaseException:
            store.unlink()
            raise
        store._entries = image.entries
        return store

    @classmethod
    def attach(cls, name: str) -> "Store":
        """Open an existing store of this user. Raises WeightsUnavailable if there is none, PermissionError if it is
        not of this process's node."""
        _require_own(name)
        try:
            store = cls(name, open_own(_path(name, "meta"), os.O_RDWR))
        except (OSError, ValueError) as error:
            raise WeightsUnavailable(f"there is no weight store {_path(name, 'meta')}: {error}") from error
        if store._words[_FORMAT] != _MAGIC:
            raise WeightsUnavailable(f"{_path(name, 'meta')} is not (yet) a weight store of this release")
        likely = max(0, store.current()) % store.num_slots  # all have the same header; this one will be read
        store._entries = read_header(memoryview(store._map(likely, writable=False)))
        return store

    def __reduce__(self) -> tuple[Callable[[str], "Store"], tuple[str]]:
        """A store that is sent to another process is attached there."""
        return Store.attach, (self.name,)

    @property
    def num_slots(self) -> int:
        return self._words[_NUM_SLOTS]

    @property
    def entries(self) -> dict[str, Entry]:
        """Name to place of every tensor; the same in all versions."""
        return self._entries

    def current(self) -> int:
        """The newest visible version; -1 if none is."""
        return self._words[_CURRENT] - 1

    def hide(self) -> None:
        """Forget all versions: nothing is visible until the next seal, and any version may be written.

        Only while nobody else uses the store. What a Reader still holds stays in place until that slot is written.
        """
        self._words[_CURRENT] = 0
        for slot in range(self.num_slots):
            self._words[self._word_of(slot) + 1] = SlotState.EMPTY

    def read(self, version: int, timeout_s: float, *, is_sealed: bool = True) -> Reader:
        """Hold `version` for reading. Raises WeightsUnavailable if it is not visible (any more), or if its slot is
        still locked by a writer after `timeout_s`. `is_sealed` False: a whole one that is not visible yet will do."""
        slot = version % self.num_slots
        lock = self._lock(slot, fcntl.LOCK_SH, timeout_s, f"reading version {version}")
        at = self._word_of(version)
        held, state, current = self._words[at], self._words[at + 1], self.current()
        if held != version or state != SlotState.WRITTEN or (is_sealed and version > current):
            lock.release()
            raise WeightsUnavailable(
                f"{self.name} does not hold version {version}: slot {slot} is {SlotState(state).name} with version "
                f"{held}, {_visible(current)}"
            )
        return Reader(version, self._entries, self._map(slot, writable=False), lock)

    def write(self, version: int, timeout_s: float) -> Writer:
        """Hold the slot of `version` for writing; what it held is gone. Raises WeightsUnavailable if readers still
        hold it after `timeout_s`, ValueError if the version may not be written."""
        current = self.current()
        if current >= 0 and (version <= current or version % self.num_slots == current % self.num_slots):
            raise ValueError(f"{self.name}: version {version} cannot be written beside the visible version {current}")
        slot = version % self.num_slots
        lock = self._lock(slot, fcntl.LOCK_EX, timeout_s, f"writing version {version}")
        mapped = self._map(slot, writable=True)
        return Writer(version, self._entries, mapped, lock, self._words, self._word_of(version))

    def write_more(self, version: int, timeout_s: float) -> Writer | Joined:
        """As `write`, but what is written of that version already stays, also if this fails."""
        lock = self._lock(version % self.num_slots, fcntl.LOCK_EX, timeout_s, f"writing more of version {version}")
        at = self._word_of(version)
        if (self._words[at], self._words[at + 1]) == (version, SlotState.WRITTEN) and version != self.current():
            return Joined(version, self._entries, self._map(version % self.num_slots, writable=True), lock)
        lock.release()
        return self.write(version, timeout_s)

    def join(self, version: int, timeout_s: float) -> Joined:
        """Write along. Raises WeightsUnavailable if nobody is writing `version`, or does not share it in time."""
        lock = self._lock(
            version % self.num_slots, fcntl.LOCK_SH, timeout_s, f"joining the writer of version {version}"
        )
        at = self._word_of(version)
        if (self._words[at], self._words[at + 1]) != (version, SlotState.WRITING):
            lock.release()
            raise WeightsUnavailable(f"{self.name}: nobody is writing version {version}")
        return Joined(version, self._entries, self._map(version % self.num_slots, writable=True), lock)

    def seal(self, version: int) -> None:
        """Make a wholly written version the visible one. Idempotent. Raises WeightsUnavailable if it is not whole."""
        if version == self.current():
            return
        at = self._word_of(version)
        held, state = self._words[at], self._words[at + 1]
        if held != version or state != SlotState.WRITTEN or version < self.current():
            raise WeightsUnavailable(
                f"{self.name}: version {version} cannot be sealed: its slot is {SlotState(state).name} with version "
                f"{held}, {_visible(self.current())}"
            )
        self._words[_CURRENT] = version + 1  # one aligned 64-bit store

    def forget_pages(self) -> None:
        """Give up this process's page tables for it; they come again when it is read or written. A page that no other
        process maps counts as this one's own memory."""
        for mapped in list(self._maps.values()):
            mapped.madvise(mmap.MADV_DONTNEED)

    def unlink(self) -> None:
        """Remove the store. Those who have it open keep what they hold. Only the owner and the janitor do this."""
        _unlink(self.name, self.num_slots)
        fcntl.flock(self._meta_fd, fcntl.LOCK_UN)

    def _word_of(self, version: int) -> int:
        return 4 + 2 * (version % self.num_slots)

    def _lock(self, slot: int, kind: int, timeout_s: float, purpose: str) -> Lock:
        try:
            return Lock(_path(self.name, str(slot)), kind, timeout_s, purpose)
        except FileNotFoundError as error:
            raise WeightsUnavailable(f"{purpose}: the weight store {self.name} was removed") from error

    def _map(self, slot: int, *, writable: bool) -> mmap.mmap:
        """Kept for the store's life: page tables are built once, not for every version."""
        if (slot, writable) not in self._maps:
            fd = open_own(_path(self.name, str(slot)), os.O_RDWR)
            prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            try:
                self._maps[slot, writable] = mmap.mmap(fd, 0, prot=prot)
            finally:
                os.close(fd)
        return self._maps[slot, writable]


def janitor(user_prefix: str) -> list[str]:
    """Remove this user's stores whose names start with `user_prefix` and whose owner is dead. Returns their names."""
    removed = []
    for file in sorted(os.listdir(SHM)):
        name, _, kind = file.rpartition(".")
        if kind != "meta" or not name.startswith(user_prefix):
            continue
        try:
            fd = open_own(f"{SHM}/{file}", os.O_RDWR)
        except (OSError, ValueError):  # gone, or what another user has put there: a file, a link, a folder
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            slots = [f for f in os.listdir(SHM) if re.fullmatch(re.escape(name) + r"\.\d+", f)]
            _unlink(name, len(slots))
            removed.append(name)
        except BlockingIOError:
            pass  # its owner lives
        finally:
            os.close(fd)
    return removed


def _require_own(name: str) -> None:
    if not name.startswith(_own_prefix):
        raise PermissionError(f"the weight store {name} is of another node: this process may open {_own_prefix}* only")


def _visible(current: int) -> str:
    return f"the visible version is {current}" if current >= 0 else "no version is visible"


def _path(name: str, part: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a weight store: letters, digits, '.', '_' and '-' only")
    return f"{SHM}/{name}.{part}"


def _unlink(name: str, num_slots: int) -> None:
    for part in [*map(str, range(num_slots)), "meta"]:  # meta last: what it does not name, no janitor would find
        with contextlib.suppress(OSError):  # gone, or another user's, who may have taken the name
            os.unlink(_path(name, part))


def _claim(path: str) -> int:
    """Create the meta file and lock it as its owner; again if a janitor came between the two."""
    while True:
        fd = _create(path, META_BYTES)
        fcntl.flock(fd, fcntl.LOCK_SH)
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)


def _create(path: str, nbytes: int) -> int:
    """A new file with all its memory taken: a sparse one would mean SIGBUS when memory runs out later."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        os.close(fd)
        os.unlink(path)
        if error.errno != errno.ENOSPC:
            raise
        left = os.statvfs(SHM)
        raise RunError(f"{path} needs {nbytes} bytes, but {SHM} has {left.f_bavail * left.f_frsize} left") from error
    return fd
