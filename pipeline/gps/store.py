"""Versioned weights of one model in one node's shared memory.

Files under /dev/shm, all 0600: `<name>.meta`, and one `<name>.<slot>` per slot. A slot's bytes are a safetensors
image, and the same file is the slot's lock: readers hold `flock` shared, the writer exclusive. The kernel frees the
lock of a process that dies, so a dead reader blocks nobody and harms nothing. Version v lives in slot v % slots;
with two slots the visible version is never written over. With one slot a store is immutable.

    EMPTY ▶ WRITING(v) ▶ WRITTEN(v) ▶ visible (`current` = v)      a writer that dies leaves WRITING: nobody reads it

`.meta` is a page of 64-bit words: `current` (one aligned store makes a version visible; the word is one more than
that, and 0 where none is), then version and state of each slot, and which piles of tensors it holds. Where a model has
several piles (placement.py), a node has memory for its own; a slot's file has holes for the rest, and grows where a
trainer writes. The process that created the store holds a shared lock
on it for as long as it lives: that is how the janitor tells a store that is in use from what a killed run left.

A lock belongs to an open file, which a fork shares: never fork while a Reader or Writer is open.

Nodes of a local run share /dev/shm; `confine` keeps a process to the stores of its own node all the same.
"""

import contextlib
import fcntl
import mmap
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from enum import IntEnum
from functools import cached_property
from types import TracebackType
from typing import Self

from pipeline.core.errors import WeightsUnavailable
from pipeline.gps import files
from pipeline.gps.elsewhere import Elsewhere
from pipeline.gps.lock import Lock, open_own
from pipeline.gps.placement import deal
from pipeline.gps.ranges import Range, merged
from pipeline.gps.room import META_BYTES
from pipeline.gps.segment import Entry, fill, plan_image, read_header
from pipeline.gps.wants import Packed, Want

_MAGIC = 0x32535047_50564954
_CURRENT, _FORMAT, _NUM_SLOTS, _NUM_PILES = 0, 1, 2, 3
_SLOTS, _PILES = 4, 64
"""Where the words of the slots begin: two of each for version and state, one bit of another for each pile."""
_MADV_POPULATE_READ = 22
_POPULATED_BYTES = 16 << 20
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
    """One slot held open: what readers and writers share. `entries`: of all tensors; `here`: of those whose bytes are
    there."""

    def __init__(
        self,
        version: int,
        entries: dict[str, Entry],
        mapped: mmap.mmap,
        lock: Lock,
        here: dict[str, Entry] | None = None,
    ) -> None:
        self.version = version
        self.entries = entries
        self.here = entries if here is None else here
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
    """A version held for reading: `version`, `here`, `buffer` (read-only). A context manager."""

    elsewhere: Elsewhere | None = None

    @property
    def is_whole(self) -> bool:
        """All tensors are here."""
        return len(self.here) == len(self.entries)

    def fetch(self, wants: Sequence[Want]) -> Iterator[tuple[Packed, memoryview]]:
        """Of tensors that are not here, as Elsewhere does. Raises WeightsUnavailable where there is none."""
        if self.elsewhere is None:
            raise WeightsUnavailable(f"{wants[0].name} is on other nodes, and this process does not reach them")
        return self.elsewhere.fetch(self.version, wants, self.entries)

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
        self.elsewhere: Elsewhere | None = None
        self._of_piles: dict[int, dict[str, Entry]] = {}

    @classmethod
    def create(
        cls,
        name: str,
        model_path: str,
        dtype: str,
        version: int,
        slots: int = 2,
        num_piles: int = 1,
        piles: Collection[int] = (0,),
    ) -> "Store":
        """Put the model into shared memory as `version`, visible at once; all memory is taken now: for the tensors that
        are in `piles`, of `num_piles`.

        `model_path` is a folder with safetensors files, or "emulated". The caller becomes the owner: it keeps the
        returned store and unlinks it at the end. Raises ConfigError for a bad model, RunError if memory is short,
        FileExistsError if the name is taken, PermissionError if it is not of this process's node.
        """
        _require_own(name)
        image = plan_image(model_path, dtype)
        store = cls(name, files.claim(files.path_of(name, "meta")))
        try:
            store._words[_NUM_SLOTS], store._words[_NUM_PILES] = slots, num_piles
            store._entries = image.entries
            own = store.ranges(piles)
            for slot in range(slots):
                fd = files.create(files.path_of(name, str(slot)), image.nbytes, [(0, len(image.header)), *own])
                os.pwrite(fd, image.header, 0)
                os.close(fd)
            at = store._word_of(version)
            store._words[at] = version
            names = None if num_piles == 1 else store.in_piles(piles)
            fill(image, memoryview(store._map(version % slots, writable=True)), names)
            store._words[at + 1] = SlotState.WRITTEN
            store._hold(version, piles)
            store._words[_CURRENT] = version + 1
            store._words[_FORMAT] = _MAGIC  # last: before it, attach fails
        except BaseException:
            store.unlink()
            raise
        return store

    @classmethod
    def attach(cls, name: str, elsewhere: Elsewhere | None = None) -> "Store":
        """Open an existing store of this user; what it does not hold comes from `elsewhere`. Raises WeightsUnavailable
        if there is none, PermissionError if it is not of this process's node."""
        _require_own(name)
        try:
            store = cls(name, open_own(files.path_of(name, "meta"), os.O_RDWR))
        except (OSError, ValueError) as error:
            raise WeightsUnavailable(f"there is no weight store {files.path_of(name, 'meta')}: {error}") from error
        if store._words[_FORMAT] != _MAGIC:
            raise WeightsUnavailable(f"{files.path_of(name, 'meta')} is not (yet) a weight store of this release")
        store.elsewhere = elsewhere
        likely = max(0, store.current()) % store.num_slots  # all have the same header; this one will be read
        store._entries = read_header(memoryview(store._map(likely, writable=False)))
        return store

    def __reduce__(self) -> tuple[Callable[..., "Store"], tuple[str, Elsewhere | None]]:
        """A store that is sent to another process is attached there."""
        return Store.attach, (self.name, self.elsewhere)

    @property
    def num_slots(self) -> int:
        return self._words[_NUM_SLOTS]

    @property
    def entries(self) -> dict[str, Entry]:
        """Name to place of every tensor; the same in all versions."""
        return self._entries

    @cached_property
    def gigabytes(self) -> float:
        """All tensors of a version."""
        return sum(entry.nbytes for entry in self._entries.values()) / 1e9

    @cached_property
    def pile_of(self) -> dict[str, int]:
        """By name of the tensor."""
        return deal({name: entry.nbytes for name, entry in self._entries.items()}, self._words[_NUM_PILES])

    def in_piles(self, piles: Collection[int]) -> dict[str, Entry]:
        return {name: entry for name, entry in self._entries.items() if self.pile_of[name] in piles}

    def ranges(self, piles: Collection[int]) -> list[Range]:
        """Where the tensors of these piles lie."""
        return merged((entry.offset, entry.nbytes) for entry in self.in_piles(piles).values())

    def grow(self, version: int) -> None:
        """Take memory for all of the version's slot. Raises RunError where there is none."""
        if self._words[_NUM_PILES] > 1:
            path = files.path_of(self.name, str(version % self.num_slots))
            fd = open_own(path, os.O_RDWR)
            try:
                files.allocate(fd, path, [(0, os.fstat(fd).st_size)])
            finally:
                os.close(fd)

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
        here = self._entries if not is_sealed else self._here(slot)
        reader = Reader(version, self._entries, self._map(slot, writable=False), lock, here)
        reader.elsewhere = self.elsewhere
        return reader

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

    def seal(self, version: int, piles: Collection[int] = ()) -> None:
        """Make a wholly written version the visible one: these piles of it, or none: all. Idempotent. Raises
        WeightsUnavailable if it is not whole."""
        if version == self.current():
            return
        at = self._word_of(version)
        held, state = self._words[at], self._words[at + 1]
        if held != version or state != SlotState.WRITTEN or version < self.current():
            raise WeightsUnavailable(
                f"{self.name}: version {version} cannot be sealed: its slot is {SlotState(state).name} with version "
                f"{held}, {_visible(self.current())}"
            )
        self._hold(version, piles or range(self._words[_NUM_PILES]))
        self._words[_CURRENT] = version + 1  # one aligned 64-bit store

    def images(self) -> list[memoryview]:
        """The memory of each slot, as readers of this process map it."""
        return [memoryview(self._map(slot, writable=False)) for slot in range(self.num_slots)]

    def forget_pages(self) -> None:
        """Give up this process's page tables for it; they come again when it is read or written. A page that no other
        process maps counts as this one's own memory."""
        for mapped in list(self._maps.values()):
            mapped.madvise(mmap.MADV_DONTNEED)

    def unlink(self) -> None:
        """Remove the store. Those who have it open keep what they hold. Only the owner and the janitor do this."""
        files.unlink(self.name, self.num_slots)
        fcntl.flock(self._meta_fd, fcntl.LOCK_UN)

    def _word_of(self, version: int) -> int:
        return _SLOTS + 2 * (version % self.num_slots)

    def _hold(self, version: int, piles: Collection[int]) -> None:
        self._words[_PILES + version % self.num_slots] = sum(1 << pile for pile in piles)

    def _here(self, slot: int) -> dict[str, Entry]:
        """The tensors that the slot holds."""
        held = self._words[_PILES + slot]
        if held not in self._of_piles:
            self._of_piles[held] = self.in_piles([p for p in range(self._words[_NUM_PILES]) if held >> p & 1])
        return self._of_piles[held]

    def _lock(self, slot: int, kind: int, timeout_s: float, purpose: str) -> Lock:
        try:
            return Lock(files.path_of(self.name, str(slot)), kind, timeout_s, purpose)
        except FileNotFoundError as error:
            raise WeightsUnavailable(f"{purpose}: the weight store {self.name} was removed") from error

    def _map(self, slot: int, *, writable: bool) -> mmap.mmap:
        """Kept for the store's life: page tables are built once, not for every version."""
        if (slot, writable) not in self._maps:
            fd = open_own(files.path_of(self.name, str(slot)), os.O_RDWR)
            prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            try:
                self._maps[slot, writable] = mmap.mmap(fd, 0, prot=prot)
            finally:
                os.close(fd)
        return self._maps[slot, writable]


def _require_own(name: str) -> None:
    if not name.startswith(_own_prefix):
        raise PermissionError(f"the weight store {name} is of another node: this process may open {_own_prefix}* only")


def _visible(current: int) -> str:
    return f"the visible version is {current}" if current >= 0 else "no version is visible"
