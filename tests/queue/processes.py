"""Real queue servers for tests, and rows to feed them."""

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipeline.queue.client import QueueClient
from pipeline.queue.schema import PromptRow, SegmentRow, VerdictRow, sequence_id
from pipeline.run_folder import RunFolder, read_json

REPOSITORY = Path(__file__).parents[2]


def wait_for(condition: Callable[[], bool], what: str, limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {limit_s} s for {what}"
        time.sleep(0.005)


def make_run(path: Path) -> RunFolder:
    run = RunFolder(path)
    run.create()
    (run.secrets / "queue.key").write_bytes(secrets.token_bytes(32))
    return run


def spawn(run: RunFolder, attempt: int = 1, port: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pipeline.queue.server", str(run.path), str(attempt), "--port", str(port)]
    return subprocess.Popen([*command, "--parent", str(os.getpid())], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)


@dataclass
class Server:
    """A queue server that serves; `restart` keeps its port, `start_at` is the port of one before."""

    run: RunFolder
    attempt: int = 1
    start_at: int = 0

    def __post_init__(self) -> None:
        self.start(self.start_at)

    def start(self, port: int = 0) -> None:
        file = self.run.secrets / f"queue-{self.attempt}.json"
        file.unlink(missing_ok=True)
        self.process = spawn(self.run, self.attempt, port)
        wait_for(lambda: file.exists() or self.process.poll() is not None, "the queue server")
        assert self.process.poll() is None, self.process.stderr.read()
        self.endpoint: str = read_json(file)["endpoint"]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stderr.close()

    def restart(self) -> None:
        self.start(int(self.endpoint.rsplit(":", 1)[1]))

    def client(self, attempt: int | None = None, secret: bytes | None = None, deadline_s: float = 20.0) -> QueueClient:
        key = (self.run.secrets / "queue.key").read_bytes()
        return QueueClient(self.endpoint, secret or key, attempt or self.attempt, deadline_s)


def prompts(step: int, num: int = 4, text: str = "sort 3 1 2") -> list[PromptRow]:
    """`num` sequences of `step`, two to a prompt."""
    return [
        PromptRow(
            id=sequence_id(step, no // 2, no % 2),
            step=step,
            prompt_no=no // 2,
            member=no % 2,
            text=text,
            data_source="digits",
            ground_truth="1 2 3",
            prompt_ids=[100 + no // 2, 7, 8],
        )
        for no in range(num)
    ]


def segment(
    id: str,
    tokens: list[int],
    finish: str = "stop",
    idx: int = 0,
    turn: int = 1,
    version: int = 0,
    kv_version: int | None = None,
) -> SegmentRow:
    return SegmentRow(
        id=id,
        idx=idx,
        turn=turn,
        tokens=tokens,
        logprobs=[-token / 8 for token in tokens],
        version=version,
        kv_version=kv_version,
        replica="rollout-0",
        finish=finish,
    )


def verdict(id: str, score: float | None = 1.0, failure: str = "", turn: int = 2) -> VerdictRow:
    return VerdictRow(
        id=id, turn=turn, score=score, failure=failure, critique=f"ü {id}", tokens=[5, 6], version=0, replica="reward-0"
    )


def score_all(queue: QueueClient, step: int, num: int = 4) -> list[str]:
    """Sequences of `step`, brought as far as SCORED; their ids."""
    rows = prompts(step, num)
    ids = [row.id for row in rows]
    queue.admit(rows)
    queue.claim(ids, [1] * num)
    queue.put_segments([segment(id, [step, no]) for no, id in enumerate(ids)])
    queue.claim(ids, [2] * num)
    queue.put_verdicts([verdict(id) for id in ids])
    return ids
