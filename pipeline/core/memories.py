"""Which node's memory holds which versions, and what is to be copied and made visible where.

A node is *cold* from its joining until its memory shows the current version; nothing runs there before. A version is
written on the nodes of the training ranks, copied to all warm ones, and sealed only when each holds what it is to hold
of it. A copy goes from a node that has something to one that lacks it, one at a time from each, so the number of
holders doubles.

What is held and copied is counted in *units*. Where ranks are on several nodes, each node first has a *share* of the
version: what its ranks wrote. And tensors are dealt into *piles*, as many as nodes: each node is to hold all of them,
or some, and what its ranks wrote. A unit is what of one share is in one pile. A node that has only some units of what
it is to hold gives or takes, and does not do both at once.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pipeline.core.decisions import CopyVersion, SealVersion
from pipeline.core.versions import Versions

Unit = tuple[int, int]
"""Share and pile."""


@dataclass(slots=True)
class Memory:
    """`piles`: what it is to hold of each version; `shown`: the visible one; `held`: units, by version. `copy`: what is
    being copied into it; `sealing`: what is being made visible. `num_failed` counts copies, since the last progress of
    the run. `is_ending`: the node is about to be lost."""

    num_slots: int
    piles: tuple[int, ...]
    shown: int
    held: dict[int, set[Unit]]
    is_cold: bool = True
    copy: CopyVersion | None = None
    is_copy_ending: bool = False
    sealing: int | None = None
    num_failed: int = 0
    is_ending: bool = False

    @property
    def is_busy(self) -> bool:
        """Nothing new can be asked of it."""
        return self.copy is not None or self.sealing is not None or self.is_ending

    def overwrite(self, version: int) -> None:
        """Of two slots the version takes the one of the second before it."""
        self.held.pop(version - 2, None)

    def has(self, version: int) -> set[Unit]:
        return self.held.get(version, set())


class Memories(dict[str, Memory]):
    """By node, in the order of joining. `num_piles`: into how many a version is dealt."""

    def __init__(self, num_piles: int = 1) -> None:
        super().__init__()
        self._num_piles = num_piles
        self._num_copies = 0
        self._num_shares: dict[int, int] = {}

    def join(self, node: str, num_slots: int, version: int, piles: Sequence[int] = ()) -> None:
        """It holds its part of the version. `piles`: what it is to hold; none: all."""
        own = tuple(piles) or tuple(range(self._num_piles))
        self[node] = Memory(num_slots, own, version, {version: self._units(version, own)})

    def lose(self, node: str) -> list[str]:
        """Returns the nodes whose copy came from there: it is void."""
        self.pop(node, None)
        receivers = [name for name, memory in self.items() if memory.copy and memory.copy.source == node]
        for name in receivers:
            self[name].copy = None
        return receivers

    def warm(self) -> list[str]:
        return [node for node, memory in self.items() if not memory.is_cold]

    def warm_up(self, current: int) -> Iterator[str]:
        """The cold nodes that show the current version: they are not cold any more."""
        for node, memory in self.items():
            if memory.is_cold and memory.shown == current and not memory.is_busy:
                memory.is_cold = False
                yield node

    def write(self, nodes: Sequence[str], version: int) -> None:
        """Trainers on these nodes have written the version there: the whole of it, or each node a share."""
        self._num_shares = {version: len(nodes)}
        for share, node in enumerate(nodes):
            if node in self:
                self[node].overwrite(version)
                self[node].held[version] = {(share, pile) for pile in range(self._num_piles)}

    def is_lost(self, version: int) -> bool:
        """Of some unit of it there is none."""
        found: set[Unit] = set().union(*(memory.has(version) for memory in self.values()))
        return not self._units(version, range(self._num_piles)) <= found

    def is_whole(self, node: str, version: int) -> bool:
        """It holds what it is to hold of it."""
        return not self._missing(node, version)

    def piles(self, node: str, version: int) -> tuple[int, ...]:
        """Of which it has all shares."""
        held = self[node].has(version)
        return tuple(p for p in range(self._num_piles) if self._units(version, [p]) <= held)

    def holders(self, version: int) -> list[str]:
        """Who holds what it is to hold of it."""
        return [node for node in self if self.is_whole(node, version)]

    def _units(self, version: int, piles: Iterable[int]) -> set[Unit]:
        return set(itertools.product(range(self._num_shares.get(version, 1)), piles))

    def _missing(self, node: str, version: int) -> set[Unit]:
        return self._units(version, self[node].piles) - self[node].has(version)

    def copied(self, node: str, number: int) -> bool:
        """False, and nothing changes, if this copy is not awaited (any more)."""
        copy = self._ended(node, number)
        if copy is not None:
            units = self._units(copy.version, copy.piles or range(self._num_piles))
            got = {(share, pile) for share, pile in units if copy.share in (-1, share)}
            self[node].held.setdefault(copy.version, set()).update(got)
        return copy is not None

    def failed(self, node: str, number: int) -> bool:
        """False, and nothing changes, if this copy is not awaited (any more)."""
        is_awaited = self._ended(node, number) is not None
        if is_awaited:
            self[node].num_failed += 1
        return is_awaited

    def sealed(self, node: str, version: int) -> bool:
        """False, and nothing changes, if this seal is not awaited (any more)."""
        memory = self.get(node)
        if memory is None or memory.sealing != version:
            return False
        memory.shown, memory.sealing = version, None
        return True

    def is_shown(self, version: int) -> bool:
        """On all warm nodes."""
        warm = self.warm()
        return bool(warm) and all(self[node].shown == version for node in warm)

    def orders(self, versions: Versions) -> list[CopyVersion | SealVersion]:
        """What is to be done now, once: each is awaited from here on."""
        found: list[CopyVersion | SealVersion] = []
        written, warm = versions.written, self.warm()
        is_everywhere = written is not None and all(self.is_whole(node, written) for node in warm)
        for node, memory in self.items():
            wanted = versions.current if memory.is_cold else written
            if wanted is None or memory.shown == wanted or memory.is_busy:
                continue
            if not self.is_whole(node, wanted):
                if copy := self._offer(node, wanted):
                    found.append(copy)
            elif memory.is_cold or is_everywhere:
                memory.sealing = wanted
                found.append(SealVersion(version=wanted, node=node, piles=self._some(self.piles(node, wanted))))
        return found

    def progress(self) -> None:
        for memory in self.values():
            memory.num_failed = 0

    def _offer(self, node: str, version: int) -> CopyVersion | None:
        """The next copy into this memory, which is busy with it from now on; None: nobody can give anything now. Of
        those who can, whoever has most of what is missing: all shares of piles at once, or one share of them."""
        own, missing = self[node], self._missing(node, version)
        sending = {memory.copy.source for memory in self.values() if memory.copy}
        if own.has(version) and node in sending:
            return None
        able = [m for m, memory in self.items() if m not in sending and not memory.is_cold and memory.copy is None]
        source = max(able, key=lambda m: len(missing & self[m].has(version)), default="")
        given = missing & self[source].has(version) if source else set()
        if not given:
            return None
        whole = {pile for _, pile in given if self._units(version, [pile]) <= given}
        share = -1 if whole else min(share for share, _ in given)
        piles = whole or {pile for of, pile in given if of == share}
        is_first = own.is_cold and not own.has(version)
        self._num_copies += 1
        own.copy = CopyVersion(
            number=self._num_copies,
            version=version,
            source=source,
            node=node,
            is_first=is_first,
            share=share,
            piles=self._some(tuple(sorted(piles))),
        )
        own.is_copy_ending = False
        own.overwrite(version)
        if is_first:
            own.shown, own.held = -1, {}
        return own.copy

    def _some(self, piles: tuple[int, ...]) -> tuple[int, ...]:
        """As decisions say it: none for all."""
        return () if len(piles) == self._num_piles else piles

    def _ended(self, node: str, number: int) -> CopyVersion | None:
        memory = self.get(node)
        if memory is None or memory.copy is None or memory.copy.number != number:
            return None
        copy, memory.copy = memory.copy, None
        return copy
