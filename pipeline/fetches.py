"""Which boxes are on their way from one node's memory to readers of another, and over which pair of movers.

    asked ▶ MOVING ─Moved of who asked▶ the pair is free for the next: the source, too, is about to be
              └─MoveFailed of either, the end of a mover or of a node▶ the pair is gone, and who asked hears of it

A mover asks each source for one thing at a time, so a pair is never shared. Like those of copies (copies.py) it belongs
to two lives of agents; but nothing here is decided by the core, for no version gets further by it.
"""

from collections import deque
from dataclasses import dataclass
from pathlib import Path

from pipeline import wire_gps
from pipeline.copies import NUM_KEPT, Made

Orders = list[tuple[str, wire_gps.Move | wire_gps.FetchFailed]]
"""To which node what is said."""


@dataclass(slots=True)
class _Pair:
    """`unheard`: the ends that are not through with what was asked last, under `ask`."""

    source: str
    node: str
    lives: tuple[bytes, bytes]
    rendezvous: Path
    number: int
    version: int
    ask: int
    unheard: set[str]


class Fetches:
    """`folder`: for rendezvous files, where all nodes can reach it; `limit_s`: how long one may take. Numbers of moves
    are negative here, those of copies are not. `num_asked`: of one source each; `num_known`: by a plan that was there;
    `made`: the last ones."""

    def __init__(self, folder: Path, attempt: int, limit_s: float) -> None:
        self._folder, self._attempt, self._limit_s = folder, attempt, limit_s
        self._pairs: dict[tuple[str, str], _Pair] = {}
        self._number = 0
        self.num_asked = self.num_known = 0
        self.made: deque[Made] = deque(maxlen=NUM_KEPT)

    def begin(self, node: str, asked: wire_gps.FetchAsked, lives: tuple[bytes, bytes]) -> Orders:
        """`lives`: the agents of source and node; b"" for one that is not there."""
        if not all(lives):
            return [(node, _failed(asked.ask, f"{asked.source} is not there"))]
        key = (asked.source, node)
        self._number -= 1
        pair = self._pairs.get(key)
        if pair is None or pair.lives != lives or node in pair.unheard:
            self._drop(pair)
            rendezvous = self._folder / f"fetch-{self._attempt}{self._number}"
            pair = self._pairs[key] = _Pair(*key, lives, rendezvous, 0, 0, 0, set())
        pair.number, pair.version, pair.ask, pair.unheard = self._number, asked.version, asked.ask, set(key)
        self.num_asked += 1
        self.num_known += asked.is_known
        return [
            (
                end,
                wire_gps.Move(
                    worker=wire_gps.MOVER,
                    number=pair.number,
                    pair=">>".join(key),
                    rank=rank,
                    rendezvous=str(pair.rendezvous),
                    version=asked.version,
                    is_first=False,
                    limit_s=self._limit_s,
                    want=asked.want,
                    store=asked.store,
                    ask=asked.ask,
                ),
            )
            for rank, end in enumerate(key)
        ]

    def moved(self, node: str, moved: wire_gps.Moved) -> None:
        for pair in self._pairs.values():
            if pair.number == moved.number:
                pair.unheard.discard(node)
                if node == pair.node:
                    self.made.append(Made(pair.version, pair.source, node, moved.num_bytes, moved.seconds))

    def move_failed(self, node: str, number: int, reason: str) -> Orders:
        """What an older one says is ignored."""
        return self._fail([p for p in self._pairs.values() if p.number == number], f"the mover of {node}: {reason}")

    def node_failed(self, node: str, reason: str) -> Orders:
        """The node is lost, or its mover has ended."""
        return self._fail([p for p in self._pairs.values() if node in (p.source, p.node)], f"{node}: {reason}")

    def _fail(self, pairs: list[_Pair], reason: str) -> Orders:
        for pair in pairs:
            self._drop(pair)
        return [(pair.node, _failed(pair.ask, reason)) for pair in pairs if pair.node in pair.unheard]

    def _drop(self, pair: _Pair | None) -> None:
        if pair is not None:
            del self._pairs[pair.source, pair.node]
            pair.rendezvous.unlink(missing_ok=True)


def _failed(ask: int, reason: str) -> wire_gps.FetchFailed:
    return wire_gps.FetchFailed(worker=wire_gps.MOVER, ask=ask, reason=reason)
