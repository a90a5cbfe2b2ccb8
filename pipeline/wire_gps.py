"""Messages about weights that go from one node's memory to another's, by way of movers.

controller ─Move▶ both ends' movers ─▶ Moved, or MoveFailed
mover ─FetchAsked▶ controller ─▶ Move to both ends, or FetchFailed
"""

import msgspec


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """As those of pipeline.wire."""


MOVER = "mover"
"""The worker that every agent keeps by itself, where there are several nodes: it copies versions between them."""


class Move(_Message, frozen=True):
    """To a mover: send `version` to the other mover of the pair (rank 0), or receive it (rank 1).

    `rendezvous`: a file, new for each pair, that both can reach; `is_first`: nobody uses the receiver's memory yet.
    `share`: only what the ranks of that node wrote, as files say whose names begin with `shares`; -1: the whole.
    `piles`: only these tensors; none: all. Or, where there is a `want`: boxes of the model `store`, as that file says,
    for what the receiver's mover asked under the number `ask`.
    """

    worker: str
    number: int
    pair: str
    rank: int
    rendezvous: str
    version: int
    is_first: bool
    limit_s: float
    share: int = -1
    shares: str = ""
    piles: list[int] = []
    want: str = ""
    store: str = "policy"
    ask: int = 0


class Moved(_Message, frozen=True):
    worker: str
    number: int
    num_bytes: int
    seconds: float


class MoveFailed(_Message, frozen=True):
    worker: str
    number: int
    reason: str


class Holders(_Message, frozen=True):
    """To a mover: which piles are in the memory of which other node."""

    worker: str
    piles: dict[str, list[int]]


class FetchAsked(_Message, frozen=True):
    """A mover wants boxes of `version` from the memory of `source`: those in the file `want`, of the model `store`
    (policy or genrm). Answered by a Move to both ends, or by FetchFailed. `ask` is the mover's own number; `is_known`:
    the plan that says so was made for an earlier read."""

    worker: str
    ask: int
    source: str
    store: str
    version: int
    want: str
    is_known: bool


class FetchFailed(_Message, frozen=True):
    """To the mover that asked."""

    worker: str
    ask: int
    reason: str
