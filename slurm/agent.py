"""The agent of one node: a process that starts the node's zygote, then lives as slurm.node describes.

    python -m slurm.agent RUN_FOLDER --node NAME --slots N --attempt K --endpoint tcp://HOST:PORT [--host H]
                          [--parent PID]
    python -m slurm.agent RUN_FOLDER --node NAME --slots N --job ID.RESTARTS      in a Slurm job: it waits until that
                          life of the job has a controller, which says the rest

First of all it starts the guardian, which removes what it leaves. The zygote's imports are the longest part of a
node's start, so they are begun before this process's own.
"""

import argparse
import importlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

from pipeline.compose import Tree, read_tree
from pipeline.processes import SHIELD, die_with_parent, python_command, python_environment
from pipeline.run_folder import RunFolder, read_json
from slurm.allocator import devices_here
from slurm.guardian import Guardian, TemporaryFolder
from slurm.names import contact, left_marker, life_name, temporary_prefix

PATIENCE_S = 15.0
_CONTACT_POLL_S = 0.02

NATIVE_ENV = {
    "OMP_NUM_THREADS": "1",  # a slot of a CPU machine is one thread's share
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # else pyarrow starts a thread in the zygote
}
"""What native libraries read once, so it must be there before the zygote's interpreter starts."""

_ENGINE_START = "stages.engines.vllm_start"
_NOT_FOR_WORKERS = ("SLURM_", "SUBMITIT_", "MLFLOW_")


def temporary_root() -> Path:
    """Where temporary files lie on this machine: where its user says, if that is a place."""
    asked = os.environ.get("TMPDIR", "")
    return Path(asked) if os.path.isabs(asked) and os.access(asked, os.W_OK) else Path("/tmp")


def worker_environment(config: Tree, cache: Path, temporary: Path) -> dict[str, str]:
    """The workers' environment: this process's, what native libraries and engines need, and `cluster.env`, which wins.

    `config` is the resolved one as it is: it was validated at submit, and loading the schema would cost 0.3 s.
    """
    judge = config["reward"]["genrm"]
    kinds = {config["rollout"]["engine"]["name"], config["trainer"]["strategy"]}
    kinds |= {judge["engine"]["name"]} if judge and not judge["endpoint"] else set()
    engine_env = {}
    if kinds != {"emulated"}:
        engine_env = importlib.import_module(_ENGINE_START).environment(str(cache))
    made = NATIVE_ENV | engine_env | {"TMPDIR": str(temporary)}
    return python_environment(_NOT_FOR_WORKERS, **(made | config["cluster"]["env"]))


def start_zygote(env: dict[str, str], log: Path, life: int) -> tuple["subprocess.Popen[bytes]", socket.socket]:
    """Returns the process and the socket to it. `life`: see Guardian; it and its workers inherit it."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its, open(log, "ab") as output:
        process = subprocess.Popen(
            [*SHIELD, *python_command("slurm.zygote", str(its.fileno()), str(os.getpid()), str(life))],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[its.fileno(), life],
        )
    return process, mine


def wait_for_controller(run: RunFolder, job: str, limit_s: float) -> tuple[int, str]:
    """Attempt and endpoint of the controller of this life of the job. Exits if none comes."""
    path, deadline = contact(run, job), time.monotonic() + limit_s
    while (told := read_json(path)) is None:
        if time.monotonic() > deadline or run.ended.exists():
            sys.exit(f"no controller of job {job} wrote {path} within {limit_s:g} s")
        time.sleep(_CONTACT_POLL_S)
    return int(told["attempt"]), str(told["endpoint"])


def _learn(args: argparse.Namespace, run: RunFolder, limit_s: float) -> None:
    """Which controller this is the agent of. From then on it writes to its attempt's log."""
    args.attempt, args.endpoint = wait_for_controller(run, args.job, limit_s)
    args.host = own_address(args.endpoint)
    log = run.process_log(args.attempt, args.node, "agent")
    with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)


def own_address(endpoint: str) -> str:
    """The address by which this host reaches the endpoint's, and so can be reached from there. Nothing is sent."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="slurm.agent")
    parser.add_argument("run", type=Path)
    parser.add_argument("--node", required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--attempt", type=int)
    parser.add_argument("--endpoint")
    parser.add_argument("--job", default="")
    parser.add_argument("--host", default="127.0.0.1", help="this node's address, for the other nodes to connect to")
    parser.add_argument("--parent", type=int, help="leave when this process ends")
    parser.add_argument("--patience", type=float, default=PATIENCE_S, help="seconds of the controller's silence")
    parser.add_argument("--witness", type=int, help="a descriptor that is held until nothing is left of this process")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> NoReturn:
    args = _arguments(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(0o077)
    if args.parent is not None:
        die_with_parent(signal.SIGTERM, args.parent)  # TERM: it still has shared memory to unlink
    if args.witness is not None:
        os.set_inheritable(args.witness, False)
    run = RunFolder(args.run)
    config = read_tree(run.config)
    if args.job:
        _learn(args, run, config["limits"]["engine_start_s"])
    name = life_name(run, args.attempt, args.node, os.getpid())
    temporary = TemporaryFolder(temporary_root(), temporary_prefix(run, os.getpid()))
    guardian = Guardian(f"{name}-", temporary.path, args.witness)
    cache = temporary.path / "cache" if args.job else run.cache / args.node  # in a job on the node's own disk
    env = worker_environment(config, cache, temporary.path)
    process, control = start_zygote(env, run.process_log(args.attempt, args.node, "zygote"), guardian.life)

    import asyncio

    from slurm.door import Door
    from slurm.node import Place, live

    cluster = config["cluster"]
    by_steps = cluster["kind"] == "slurm" and cluster["slurm"]["launcher"] == "step"
    door = Door(name, env, guardian.life) if by_steps else None

    place = Place(
        run=run,
        node=args.node,
        name=name,
        temporary=temporary.path,
        num_slots=args.slots,
        attempt=args.attempt,
        endpoint=args.endpoint,
        host=args.host,
        patience_s=args.patience,
        job=args.job,
        devices=devices_here(os.environ) if door is None else None,
        door=door,
        heartbeat_s=config["limits"]["heartbeat_s"],
        engine_s=config["limits"]["engine_s"],
        slot_memory=cluster["slot_memory"],
    )
    leave = asyncio.run(live(place, process, control))
    print(f"agent of {args.node} leaves: {leave}", flush=True)
    if args.job and not leave.comes_again:
        left_marker(run, args.job, args.node).touch(0o600)
    if args.job and (leave.is_alone or not leave.comes_again):
        from slurm.again import stand_by

        guardian.let_go()
        print(stand_by(run, args.job, is_alone=leave.is_alone, is_termed=leave.is_termed), flush=True)
    os._exit(1 if leave.comes_again else 0)  # not waiting for a thread that still copies weights


if __name__ == "__main__":
    main()
