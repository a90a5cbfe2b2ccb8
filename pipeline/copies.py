"""Which versions are on their way from one node's memory to another's, and over which pair of movers.

    asked ▶ MOVING ─receiver's Moved▶ copied ─sender's Moved▶ the pair is free
              └─MoveFailed of either, the end of a mover or of the source▶ failed, the pair is gone

A pair belongs to two lives of agents, and serves one copy after the other while all goes well. After anything else the
next copy gets a pair of its own with a new rendezvous file, so that nobody waits for one who has given it up.
"""

from collections import deque
from dataclasses import dataclass
from pathlib import Path

from pipeline import wire_gps
from pipeline.core import decisions as de
from pipeline.core import events as ev

Lives = tuple[bytes, bytes]
NUM_KEPT = 12


@dataclass(slots=True)
class _Pair:
    """`lives`: the agents of source and node; `number`, `version`: of its newest copy; `unheard`: the ends that have
    not said that they are through with that."""

    source: str
    node: str
    lives: Lives
    rendezvous: Path
    number: int
    unheard: set[str]
    version: int = -1

    @property
    def is_moving(self) -> bool:
        return self.node in self.unheard


@dataclass(frozen=True, slots=True)
class Made:
    """A copy, or a read from another node, that was made."""

    version: int
    source: str
    node: str
    num_bytes: int
    seconds: float


class Copies:
    """`folder`: for rendezvous files, where all nodes can reach it; `limit_s`: how long a mover may wait for the other
    one, or for a slot; `made`: the last copies. Every copy ends in one event, but one whose receiver is lost: NodeLost
    says that."""

    def __init__(self, folder: Path, attempt: int, limit_s: float) -> None:
        self._folder, self._attempt, self._limit_s = folder, attempt, limit_s
        self._pairs: dict[tuple[str, str], _Pair] = {}
        self._given_up: dict[tuple[int, str], float | None] = {}
        """Copy and end, of ends that were left alone and have not said that they know; since when somebody looks."""
        self.made: deque[Made] = deque(maxlen=NUM_KEPT)

    def begin(self, copy: de.CopyVersion, lives: Lives) -> dict[str, wire_gps.Move]:
        """What to say to which node. `lives`: the identities of the agents of source and node. Nobody waits any more
        for an older copy to the node."""
        key = (copy.source, copy.node)
        for given_up in [p for p in self._pairs.values() if p.node == copy.node and p.is_moving]:
            self._drop(given_up)
        pair = self._pairs.get(key)
        if pair is None or pair.lives != lives or pair.unheard:
            rendezvous = self._folder / f"move-{self._attempt}-{copy.number}"
            pair = _Pair(*key, lives, rendezvous, 0, set())
            self._pairs[key] = pair
        pair.number, pair.version, pair.unheard = copy.number, copy.version, set(key)
        return {
            end: wire_gps.Move(
                worker=wire_gps.MOVER,
                number=pair.number,
                pair=">".join(key),
                rank=rank,
                rendezvous=str(pair.rendezvous),
                version=copy.version,
                is_first=copy.is_first,
                limit_s=self._limit_s,
                share=copy.share,
                shares=str(self._folder / f"share-{self._attempt}") if copy.share >= 0 else "",
                piles=list(copy.piles),
            )
            for rank, end in enumerate(key)
        }

    def ends(self, node: str) -> tuple[str, ...]:
        """Source and node of the copy that is on its way to the node; nothing if there is none."""
        return next(((p.source, p.node) for p in self._pairs.values() if p.node == node and p.is_moving), ())

    def overdue(self, now: float, after_s: float) -> list[str]:
        """Nodes whose mover has gone on for so long with a copy that is over: it may wait for one that is gone, and
        holds a slot. Once each; such a mover is to be killed."""
        found = []
        for (number, node), since in list(self._given_up.items()):
            if since is None:
                self._given_up[number, node] = now
            elif now - since > after_s:
                del self._given_up[number, node]
                found.append(node)
        return found

    def moved(self, node: str, moved: wire_gps.Moved) -> list[ev.Event]:
        """The node's mover is through with it. What an older copy's says is ignored, here and below."""
        self._given_up.pop((moved.number, node), None)
        pair = self._numbered(moved.number)
        if pair is None:
            return []
        pair.unheard.discard(node)
        if node != pair.node:
            return []
        self.made.append(Made(pair.version, pair.source, pair.node, moved.num_bytes, moved.seconds))
        return [ev.VersionCopied(number=moved.number, node=node)]

    def move_failed(self, node: str, number: int, reason: str) -> list[ev.Event]:
        self._given_up.pop((number, node), None)
        pair = self._numbered(number)
        return [] if pair is None else self._fail([pair], f"the mover of {node}: {reason}", node)

    def mover_ended(self, node: str, reason: str) -> list[ev.Event]:
        self._forget(node)
        return self._fail(self._of(node), f"the mover of {node} ended: {reason}", node)

    def node_lost(self, node: str, reason: str) -> list[ev.Event]:
        """Copies from it have failed; of those to it nobody waits any more."""
        self._forget(node)
        pairs = self._of(node)
        for pair in pairs:
            pair.unheard.discard(node)
        return self._fail(pairs, f"{node} is lost: {reason}", node)

    def _forget(self, node: str) -> None:
        self._given_up = {key: since for key, since in self._given_up.items() if key[1] != node}

    def _numbered(self, number: int) -> _Pair | None:
        return next((pair for pair in self._pairs.values() if pair.number == number), None)

    def _of(self, node: str) -> list[_Pair]:
        return [pair for pair in self._pairs.values() if node in (pair.source, pair.node)]

    def _fail(self, pairs: list[_Pair], reason: str, heard: str) -> list[ev.Event]:
        """`heard`: the end that is known to be through with it."""
        for pair in pairs:
            self._drop(pair, heard)
        return [ev.CopyFailed(number=p.number, node=p.node, reason=reason) for p in pairs if p.is_moving]

    def _drop(self, pair: _Pair, heard: str = "") -> None:
        del self._pairs[pair.source, pair.node]
        self._given_up.update({(pair.number, end): None for end in pair.unheard if end != heard})
        pair.rendezvous.unlink(missing_ok=True)
