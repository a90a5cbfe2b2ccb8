"""Which node's memory holds which versions, and what is to be copied and made visible where.

A node is *cold* from its joining until its memory shows the current version; nothing runs there before. A version is
written on the nodes of the training ranks, copied to all warm ones, and sealed only when all of them hold it. A copy
goes from a node that holds the version to one that does not, one at a time from each, so the number of holders doubles.

Where ranks are on several nodes, each node first has a *share* of the version: what its ranks wrote. Shares are copied
one by one, from whoever has them; a node that gives or takes one does nothing else with its memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pipeline.core.decisions import CopyVersion, SealVersion
from pipeline.core.versions import Versions


@dataclass(slots=True)
class Memory:
    """`shown`: the visible version; `whole`: all that it holds the whole of; `shares`: what it has of versions that it
    does not. `copy`: what is being copied into it; `sealing`: what is being made visible. `num_failed` counts copies,
    since the last progress of the run. `is_ending`: the node is about to be lost."""

    num_slots: int
    shown: int
    whole: set[int]
    is_cold: bool = True
    copy: CopyVersion | None = None
    is_copy_ending: bool = False
    sealing: int | None = None
    num_failed: int = 0
    is_ending: bool = False
    shares: dict[int, set[int]] = field(default_factory=dict)

    @property
    def is_busy(self) -> bool:
        """Nothing new can be asked of it."""
        return self.copy is not None or self.sealing is not None or self.is_ending

    def overwrite(self, version: int) -> None:
        """Of two slots the version takes the one of the second before it."""
        self.whole.discard(version - 2)
        self.shares.pop(version - 2, None)

    def has(self, version: int, share: int) -> bool:
        return version in self.whole or share in self.shares.get(version, ())


class Memories(dict[str, Memory]):
    """By node, in the order of joining."""

    def __init__(self) -> None:
        super().__init__()
        self._num_copies = 0
        self._num_shares: dict[int, int] = {}

    def join(self, node: str, num_slots: int, version: int) -> None:
        self[node] = Memory(num_slots, version, {version})

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
                self[node].shares[version] = {share}
                self._complete(node, version)

    def is_lost(self, version: int) -> bool:
        """Nobody has it, or a share of it."""
        num = self._num_shares.get(version, 1)
        return not all(any(memory.has(version, share) for memory in self.values()) for share in range(num))

    def _complete(self, node: str, version: int) -> None:
        """It holds the whole, if it has all shares."""
        memory = self[node]
        if len(memory.shares.get(version, ())) == self._num_shares.get(version, 1):
            del memory.shares[version]
            memory.whole.add(version)

    def holders(self, version: int) -> list[str]:
        return [node for node, memory in self.items() if version in memory.whole]

    def copied(self, node: str, number: int) -> bool:
        """False, and nothing changes, if this copy is not awaited (any more)."""
        copy = self._ended(node, number)
        if copy is not None and copy.share >= 0:
            self[node].shares.setdefault(copy.version, set()).add(copy.share)
            self._complete(node, copy.version)
        elif copy is not None:
            self[node].whole.add(copy.version)
            self[node].shares.pop(copy.version, None)
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
        is_everywhere = all(written in self[node].whole for node in warm)
        for node, memory in self.items():
            wanted = versions.current if memory.is_cold else written
            if wanted is None or memory.shown == wanted or memory.is_busy:
                continue
            if wanted not in memory.whole:
                source, share = self._offer(node, wanted)
                if source:
                    self._num_copies += 1
                    memory.copy = CopyVersion(
                        number=self._num_copies,
                        version=wanted,
                        source=source,
                        node=node,
                        is_first=memory.is_cold,
                        share=share,
                    )
                    memory.is_copy_ending = False
                    memory.overwrite(wanted)
                    if memory.is_cold:
                        memory.shown, memory.whole = -1, set()
                    found.append(memory.copy)
            elif memory.is_cold or is_everywhere:
                memory.sealing = wanted
                found.append(SealVersion(version=wanted, node=node))
        return found

    def progress(self) -> None:
        for memory in self.values():
            memory.num_failed = 0

    def _offer(self, node: str, version: int) -> tuple[str, int]:
        """A warm node that sends nothing, and what it can give to this one: the whole (-1), where that has nothing of
        it, or a share. ("", -1): nobody, for now."""
        own = self[node]
        sending = {memory.copy.source for memory in self.values() if memory.copy}
        idle = [name for name in self if name not in sending and not self[name].is_cold]
        whole = next((name for name in idle if version in self[name].whole), "")
        if whole and not own.shares.get(version):
            return whole, -1
        if node not in sending and not own.is_cold:
            for share in range(self._num_shares.get(version, 1)):
                able = (name for name in idle if self[name].copy is None and self[name].has(version, share))
                if not own.has(version, share) and (giver := next(able, "")):
                    return giver, share
        return "", -1

    def _ended(self, node: str, number: int) -> CopyVersion | None:
        memory = self.get(node)
        if memory is None or memory.copy is None or memory.copy.number != number:
            return None
        copy, memory.copy = memory.copy, None
        return copy
