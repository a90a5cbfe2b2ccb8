"""The part `elsewhere` of gps.py: a replica on one of four local nodes reads what the three others hold.

Beside it, between the same four nodes and of the same bytes: a raw `batch_isend_irecv`; a broadcast of every tensor
from who holds it to all; and `torch.distributed.checkpoint`, which the holders save and the receiver loads.

`python benchmarks/gps_elsewhere.py RANK RENDEZVOUS FOLDER` is one of the other holders.
"""

import sys
import tempfile
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

from gps_layouts import cut_down, sparse_model
from harness import Must, percentile

from pipeline.gps.layout import alone, whole
from pipeline.gps.placement import deal
from pipeline.gps.segment import plan_image
from tests.gps.shapes import QWEN_7B

NODES, READER, ROUNDS = 4, 0, 7
MODEL_BYTES = 1 << 30
_LIMIT = timedelta(seconds=120)
_STOP, _RAW, _BROADCAST, _SAVE = range(4)


ELSEWHERE_MUST = {"elsewhere_of_raw": Must(at_least=0.7)}


def measure_elsewhere() -> dict[str, Any]:
    """Seconds of each way, in turns; of reads also the first, which makes the lines."""
    import subprocess

    from tests.stages.weights.fetching import world

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model").mkdir()
        sparse_model(folder / "model", cut_down(QWEN_7B, MODEL_BYTES).shapes())
        with world(folder / "run", str(folder / "model"), NODES, 1, "bfloat16") as nodes:
            rendezvous = folder / "rendezvous"
            children = [
                subprocess.Popen([sys.executable, __file__, str(rank), str(rendezvous), str(folder)])
                for rank in range(1, NODES)
            ]
            try:
                peers = _Peers(READER, rendezvous, folder)
                return _in_turns(nodes.reader(nodes.names[READER]), peers)
            finally:
                for child in children:
                    child.kill()
                    child.wait()


def _in_turns(store: Any, peers: "_Peers") -> dict[str, Any]:
    from stages.weights.boxes import all_of, read

    wanted = peers.wanted
    found: dict[str, Any] = {"num_bytes": sum(t.nbytes for t in wanted.values()), "seconds": {}}
    flat = {name: tensor.view(-1) for name, tensor in wanted.items()}

    def gps() -> None:
        with store.read(0, 5.0) as reader:
            parts = [alone(name, whole(entry.shape)) for name, entry in store.entries.items() if name in wanted]
            read(parts, all_of(reader), flat)

    ways = {"gps": gps, "raw": peers.raw, "broadcast": peers.broadcast, "checkpoint": peers.checkpoint}
    started = time.perf_counter()
    gps()
    found["cold_s"] = time.perf_counter() - started
    for way in ways:
        ways[way]()
    for _ in range(ROUNDS):
        for way, call in ways.items():
            started = time.perf_counter()
            call()
            found["seconds"].setdefault(way, []).append(time.perf_counter() - started)
    peers.tell(_STOP)
    return found


def elsewhere_figures(raw: dict[str, Any]) -> dict[str, float | None]:
    medians = {way: percentile(seconds, 0.5) for way, seconds in raw["seconds"].items()}
    rates = {f"elsewhere_gb_s/{way}": raw["num_bytes"] / 1e9 / seconds for way, seconds in medians.items()}
    cold_warm = {"elsewhere_s/cold": raw["cold_s"], "elsewhere_s/warm": medians["gps"]}
    return {"elsewhere_of_raw": medians["raw"] / medians["gps"], **rates, **cold_warm}


class _Peers:
    """One rank's end of all that the store is compared with. Rank r holds pile r, and only rank 0 wants what others
    have. The calls are the receiver's; the others `serve`."""

    def __init__(self, rank: int, rendezvous: Path, folder: Path) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self._rank, self._saved = rank, folder / "saved"
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=NODES, timeout=_LIMIT)
        entries = plan_image(str(folder / "model"), "bfloat16").entries
        self._pile = deal({name: entry.nbytes for name, entry in entries.items()}, NODES)
        self._shapes = {name: entry.shape for name, entry in entries.items()}
        mine = {name for name in entries if self._pile[name] == rank}
        self._held = {name: torch.zeros(self._shapes[name], dtype=torch.bfloat16) for name in entries if name in mine}
        self.wanted = {
            name: torch.zeros(shape, dtype=torch.bfloat16)
            for name, shape in self._shapes.items()
            if rank == READER and name not in mine
        }
        self._all = {**self._held, **self.wanted}
        self._save()

    def tell(self, what: int) -> None:
        import torch
        import torch.distributed as dist

        dist.broadcast(torch.tensor([what]), READER)

    def raw(self) -> None:
        self.tell(_RAW)
        self._exchange()

    def broadcast(self) -> None:
        self.tell(_BROADCAST)
        self._broadcast()

    def checkpoint(self) -> None:
        """Saved it is already, into files in memory: only loading is timed."""
        import torch.distributed.checkpoint as dcp

        state: dict[str, Any] = dict(self.wanted)
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(state, checkpoint_id=self._saved, no_dist=True)

    def serve(self) -> None:
        import torch
        import torch.distributed as dist

        while True:
            what = torch.zeros(1, dtype=torch.int64)
            dist.broadcast(what, READER)
            if what.item() == _STOP:
                return
            if what.item() == _RAW:
                self._exchange()
            else:
                self._broadcast()

    def _exchange(self) -> None:
        import torch.distributed as dist

        if self._rank == READER:
            ops = [dist.P2POp(dist.irecv, tensor, self._pile[name]) for name, tensor in self.wanted.items()]
        else:
            ops = [dist.P2POp(dist.isend, tensor, READER) for tensor in self._held.values()]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    def _broadcast(self) -> None:
        import torch
        import torch.distributed as dist

        for name, shape in self._shapes.items():
            if self._pile[name] != READER:
                tensor = self._all.get(name)
                dist.broadcast(torch.empty(shape, dtype=torch.bfloat16) if tensor is None else tensor, self._pile[name])

    def _save(self) -> None:
        """Together: each rank its own."""
        import torch.distributed.checkpoint as dcp

        dcp.save(dict(self._held), checkpoint_id=self._saved)


if __name__ == "__main__":
    _Peers(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])).serve()
