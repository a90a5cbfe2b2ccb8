"""The sequence queue under load: `python benchmarks/queue.py [--runs 3] [--batches 128]`.

Four client processes, batches of 8 sequences of 2,048 tokens (256 of prompt), a server of its own for each run. In
the first phase all of them put segments, in the second all of them claim whole sequences. Keys:

  put_per_s          sequences put and acknowledged per second, best run
  claim_per_s        sequences claimed and fetched per second, best run
  put_per_s/worst    the same of the worst run
  claim_per_s/worst
  put_ms/p50 /p99    one put of 8 sequences, of all runs
  claim_ms/p50 /p99  one claim of 8 sequences, of all runs
  puts_per_sync      puts that shared one fdatasync (best put run)
  kills/num          kills of the server while the four clients put (it is started again on its port)
  kills/lost         acknowledged segments that were not there at the end, or not as they were put
  kills/doubled      segments that were there more than once
  kills/retaken      puts that were under way when the server was killed
  load/max           the machine's load average (1 min) before a run
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from harness import Must, main, parser, percentile

from pipeline.queue.client import QueueClient
from pipeline.queue.schema import PromptRow, SegmentRow, sequence_id
from tests.queue.processes import Server, make_run

MUST = {
    "put_per_s": Must(at_least=2000),
    "claim_per_s": Must(at_least=2000),
    "kills/num": Must(at_least=4),
    "kills/lost": Must(at_most=0),
    "kills/doubled": Must(at_most=0),
}
CLIENTS, BATCH, TOKENS, PROMPT_TOKENS = 4, 8, 2048, 256
KILLS = 4


# --- the clients' side ---------------------------------------------------------------------------------------------


def client_main(phase: str, run: Path, endpoint: str, client: int, batches: int) -> None:
    """Get ready, say so, wait for the word, work; then print when it began and ended and how long each call took."""
    queue = QueueClient(endpoint, (run / "secrets" / "queue.key").read_bytes(), 1, deadline_s=60)
    queue.stats()
    work = {"admit": admit, "put": put, "claim": claim}[phase](queue, client, batches)
    print("ready", flush=True)
    sys.stdin.readline()
    samples, started = [], time.monotonic()
    for call in work:
        before = time.monotonic()
        call()
        samples.append(time.monotonic() - before)
        if phase == "put":
            print(len(samples), flush=True)  # acknowledged so far
    print(json.dumps({"started": started, "ended": time.monotonic(), "samples": samples}), flush=True)


def ids_of(client: int, batch: int) -> list[str]:
    return [sequence_id(1 + client, batch, member) for member in range(BATCH)]


def tokens_of(id: str) -> list[int]:
    """Recognisable: the sequence's own number first."""
    _, batch, member = map(int, id.split("-"))
    return [batch * BATCH + member, *range(1000, 1000 + TOKENS - 1)]


def admit(queue: QueueClient, client: int, batches: int) -> list[Any]:
    def call(batch: int) -> None:
        queue.admit(
            [
                PromptRow(
                    id=id,
                    step=1 + client,
                    prompt_no=batch,
                    member=member,
                    text="sort 3 1 2",
                    data_source="digits",
                    ground_truth="1 2 3",
                    prompt_ids=list(range(PROMPT_TOKENS)),
                )
                for member, id in enumerate(ids_of(client, batch))
            ]
        )
        queue.claim(ids_of(client, batch), [1] * BATCH)

    return [lambda batch=batch: call(batch) for batch in range(batches)]


def put(queue: QueueClient, client: int, batches: int) -> list[Any]:
    logprobs = [-i / TOKENS for i in range(TOKENS)]

    def rows(batch: int) -> list[SegmentRow]:
        return [
            SegmentRow(
                id=id,
                idx=0,
                turn=1,
                tokens=tokens_of(id),
                logprobs=logprobs,
                version=0,
                replica=f"rollout-{client}",
                finish="stop",
            )
            for id in ids_of(client, batch)
        ]

    made = [rows(batch) for batch in range(batches)]
    return [lambda batch=batch: queue.put_segments(batch) for batch in made]


def claim(queue: QueueClient, client: int, batches: int) -> list[Any]:
    def call(batch: int) -> None:
        found = queue.claim(ids_of(client, batch), [2] * BATCH)
        assert [len(row.tokens) for row in found] == [TOKENS] * BATCH

    return [lambda batch=batch: call(batch) for batch in range(batches)]


# --- the measuring side --------------------------------------------------------------------------------------------


class Clients:
    """Four client processes in one phase. `acknowledged[i]`: batches that client i has put."""

    def __init__(self, phase: str, server: Server, batches: int) -> None:
        self.acknowledged = [0] * CLIENTS
        self._done: list[dict[str, Any]] = []
        command = [sys.executable, __file__, "--client", phase, str(server.run.path), server.endpoint]
        self._processes = [
            subprocess.Popen([*command, str(n), str(batches)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for n in range(CLIENTS)
        ]
        for process in self._processes:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        self._readers = [threading.Thread(target=self._read, args=(n,)) for n in range(CLIENTS)]

    def start(self) -> None:
        for process, reader in zip(self._processes, self._readers, strict=True):
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.close()
            reader.start()

    def results(self) -> list[dict[str, Any]]:
        for process, reader in zip(self._processes, self._readers, strict=True):
            reader.join()
            assert process.wait() == 0
        return self._done

    def _read(self, client: int) -> None:
        stdout = self._processes[client].stdout
        assert stdout is not None
        for line in stdout:
            if line.startswith("{"):
                self._done.append(json.loads(line))
            else:
                self.acknowledged[client] = int(line)


def run_phase(phase: str, server: Server, batches: int) -> list[dict[str, Any]]:
    clients = Clients(phase, server, batches)
    clients.start()
    return clients.results()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    runs = []
    for _ in range(args.runs):
        with tempfile.TemporaryDirectory() as folder:
            server = Server(make_run(Path(folder) / "run"))
            load = os.getloadavg()[0]
            run_phase("admit", server, args.batches)
            before = server.client().stats()["syncs"]
            phases = {"put": run_phase("put", server, args.batches)}
            syncs = server.client().stats()["syncs"] - before
            phases["claim"] = run_phase("claim", server, args.batches)
            server.kill()
        runs.append({"load": load, "syncs": syncs, **phases})
    return {"batches": args.batches, "runs": runs, "kills": measure_kills(args.batches)}


def measure_kills(batches: int) -> dict[str, Any]:
    """Kill the server, evenly spread over the puts; then compare what is there with what was acknowledged."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(make_run(Path(folder) / "run"))
        run_phase("admit", server, batches)
        clients = Clients("put", server, batches)
        clients.start()
        kills = []
        for kill in range(1, KILLS + 1):
            while sum(clients.acknowledged) < kill * CLIENTS * batches // (KILLS + 1):
                time.sleep(0.001)
            server.kill()
            promised = list(clients.acknowledged)
            server.restart()
            kills.append({"promised": promised, **compare(server, promised)})
        clients.results()
        kills.append({"promised": [batches] * CLIENTS, **compare(server, [batches] * CLIENTS)})
        segments = server.client().stats()["segments"]
        server.kill()
    return {"num": KILLS, "moments": kills, "segments": segments, "put": CLIENTS * BATCH * batches}


def compare(server: Server, promised: list[int]) -> dict[str, int]:
    """Of what was acknowledged: how many sequences lack their segment, have it altered, or have more than one."""
    queue = server.client()
    lost = doubled = 0
    for client, batches in enumerate(promised):
        for batch in range(batches):
            for row in queue.get(ids_of(client, batch)):
                lost += row.num_segments == 0 or row.tokens[:TOKENS] != tokens_of(row.id)
                doubled += row.num_segments > 1
    return {"lost": lost, "doubled": doubled}


def figures(raw: dict[str, Any]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for phase in ("put", "claim"):
        rates = [rate(run[phase]) for run in raw["runs"]]
        calls = [1e3 * s for run in raw["runs"] for client in run[phase] for s in client["samples"]]
        found[f"{phase}_per_s"] = max(rates)
        found[f"{phase}_per_s/worst"] = min(rates)
        found[f"{phase}_ms/p50"] = percentile(calls, 0.5)
        found[f"{phase}_ms/p99"] = percentile(calls, 0.99)
    best = max(raw["runs"], key=lambda run: rate(run["put"]))
    found["puts_per_sync"] = CLIENTS * raw["batches"] / best["syncs"]
    kills = raw["kills"]
    found["kills/num"] = kills["num"]
    found["kills/lost"] = sum(moment["lost"] for moment in kills["moments"])
    found["kills/doubled"] = sum(moment["doubled"] for moment in kills["moments"]) + kills["segments"] - kills["put"]
    found["load/max"] = max(run["load"] for run in raw["runs"])
    return found


def rate(clients: list[dict[str, Any]]) -> float:
    """Sequences per second from the first client's start to the last one's end."""
    num = sum(len(client["samples"]) for client in clients) * BATCH
    return num / (max(c["ended"] for c in clients) - min(c["started"] for c in clients))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--client"]:
        client_main(sys.argv[2], Path(sys.argv[3]), sys.argv[4], *map(int, sys.argv[5:]))
        sys.exit()
    arguments = parser(__doc__ or "")
    arguments.add_argument("--runs", type=int, default=3)
    arguments.add_argument("--batches", type=int, default=128, help="per client and phase")
    sys.exit(main("queue", arguments.parse_args(), measure, figures, MUST))
