"""What one CUDA GPU can show: `benchmarks/gpu_one.sh [slot offload step nccl vllm]`, below 8 minutes in all.

Each part is a process of its own with a limit, runs with what it finds, and otherwise says what it lacks. Never
required by a test. Parts and what they say:

  slot      a version in shared memory is read to the GPU, with and without cudaHostRegister, and from pinned memory:
            GB/s, the ratios, what the registration costs
  offload   weights and AdamW's state of a trainer of 1.5 B parameters to pinned memory and back: seconds, GB/s, GPU
            memory given back, whether all bits came back, whether a later cycle pinned anything
  step      the same training step there and on the CPU; and one after a sleep against one without
  nccl      what lines between movers promise, on NCCL with one rank, and its GB/s
  vllm      with vLLM for CUDA: sleep, wake, an update in place, each with the trainer's probe
"""

import argparse
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import OUT  # also takes this folder from the path: queue.py has the name of a standard module

LIMITS_S = {"slot": 60, "offload": 120, "step": 90, "nccl": 60, "vllm": 140}
_GB = 1e9
_SLOT_BYTES = 2 << 30
_PARAMETERS = 1_500_000_000
_TOLERANCE = 1e-3


class Lacking(Exception):
    """What a part needs and this machine has not."""


def need_cuda() -> Any:
    if importlib.util.find_spec("torch") is None:
        raise Lacking("PyTorch")
    import torch

    if not torch.cuda.is_available():
        raise Lacking("a CUDA device")
    return torch


def need(*modules: str) -> None:
    if absent := [name for name in modules if importlib.util.find_spec(name) is None]:
        raise Lacking(f"the modules {', '.join(absent)}")


def need_room(num_bytes: int, free: int, where: str) -> None:
    if num_bytes > free:
        raise Lacking(f"{num_bytes / _GB:.1f} GB of {where}: {free / _GB:.1f} GB are free")


def seconds(call: Callable[[], object], repetitions: int = 5) -> float:
    """The median, to the end of what it has started on the GPU; one more before to warm up."""
    import torch

    found = []
    for _ in range(repetitions + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])


def free_memory() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


@contextmanager
def store_of(size: int) -> Any:
    """A weight store whose version 0 is one tensor of `size` float32 values."""
    from pipeline.gps.store import Store

    with tempfile.TemporaryDirectory() as folder:
        header = {"weight": {"dtype": "F32", "shape": [size], "data_offsets": [0, 4 * size]}}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(Path(folder) / "model.safetensors", "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + 4 * size)
        store = Store.create(f"pivot-{os.getuid()}-gpu{os.getpid()}-policy", folder, "float32", 0)
    try:
        yield store
    finally:
        store.unlink()


# --- the parts ------------------------------------------------------------------------------------------------------


def slot() -> dict[str, Any]:
    torch = need_cuda()
    need("numpy")
    need_room(2 * _SLOT_BYTES, shutil.disk_usage("/dev/shm").free, "/dev/shm")
    need_room(4 * _SLOT_BYTES, free_memory(), "memory")
    from stages.weights.tensors import views

    with store_of(_SLOT_BYTES // 4) as store:
        with store.write(1, 1.0) as writer:
            views(writer)["weight"].copy_(torch.arange(_SLOT_BYTES // 4, dtype=torch.float32))
        store.seal(1)
        with store.read(1, 1.0) as reader:
            source = views(reader)["weight"]
            target = torch.empty_like(source, device="cuda")
            pinned = torch.empty_like(source, pin_memory=True).copy_(source)
            plain_s = seconds(lambda: target.copy_(source))
            is_equal = torch.equal(target.cpu(), source)
            pinned_s = seconds(lambda: target.copy_(pinned, non_blocking=True))
            cudart = torch.cuda.cudart()
            page = source.data_ptr() // 4096 * 4096
            num_bytes = -(-(source.data_ptr() + source.nbytes - page) // 4096) * 4096
            began = time.perf_counter()
            error = int(cudart.cudaHostRegister(page, num_bytes, 8))  # read-only, as the mapping is
            register_s = time.perf_counter() - began
            registered_s = None if error else seconds(lambda: target.copy_(source, non_blocking=True))
            if not error:
                is_equal = is_equal and torch.equal(target.cpu(), source)
                cudart.cudaHostUnregister(page)
    return {
        "gb": _SLOT_BYTES / _GB,
        "pinned_gb_s": _SLOT_BYTES / _GB / pinned_s,
        "slot_gb_s": _SLOT_BYTES / _GB / plain_s,
        "slot_ratio": pinned_s / plain_s,
        "register_error": error,
        "register_s": register_s,
        "registered_gb_s": _SLOT_BYTES / _GB / registered_s if registered_s else None,
        "registered_ratio": pinned_s / registered_s if registered_s else None,
        "is_equal": is_equal,
    }


def offload() -> dict[str, Any]:
    torch = need_cuda()
    need("numpy")
    need_room(14 * _PARAMETERS, free_memory(), "memory")
    need_room(20 * _PARAMETERS, torch.cuda.mem_get_info()[0], "GPU memory")
    from stages.rl.offload import Chunks, Offload

    shapes = [(1536, 8960)] * (_PARAMETERS // (1536 * 8960))
    parameters = [torch.nn.Parameter(torch.randn(shape, device="cuda")) for shape in shapes]
    optimizer = torch.optim.AdamW(parameters, foreach=False)
    pinned = Chunks()
    away = Offload(torch.device("cuda:0"), memory=pinned)
    weight_bytes = sum(parameter.nbytes for parameter in parameters)
    cycles = []

    def tensors() -> list[Any]:
        return [*parameters, *(value for state in optimizer.state.values() for value in state.values())]

    def sums() -> list[int]:
        held = [tensor for tensor in tensors() if tensor.is_cuda]
        return [int(tensor.detach().view(torch.int32).sum(dtype=torch.int64)) for tensor in held]

    def cycle(to_come_bytes: int = 0) -> None:
        torch.cuda.synchronize()
        before, began = torch.cuda.mem_get_info()[0], time.perf_counter()
        away.take(tensors(), (), to_come_bytes)
        sleep_s, num_bytes = time.perf_counter() - began, away.num_bytes
        given, began = torch.cuda.mem_get_info()[0] - before, time.perf_counter()
        away.give_back()
        found = {"sleep_s": sleep_s, "wake_s": time.perf_counter() - began, "state_gb": num_bytes / _GB}
        cycles.append(found | {"given_back_gb": given / _GB, "pinned_chunks": pinned.num_allocations})

    cycle(2 * weight_bytes + 64 * len(parameters))  # the start: all is pinned, also for the moments to come
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    before = sums()
    for _ in range(4):
        cycle()
    warm = cycles[1:]
    median = {name: statistics.median(found[name] for found in warm) for name in warm[0]}
    return {
        "parameters": sum(parameter.numel() for parameter in parameters),
        "first": cycles[0],
        **median,
        "sleep_gb_s": median["state_gb"] / median["sleep_s"],
        "wake_gb_s": median["state_gb"] / median["wake_s"],
        "is_equal": sums() == before,
        "pinned_later": cycles[-1]["pinned_chunks"] - cycles[0]["pinned_chunks"],
    }


def step() -> dict[str, Any]:
    need_cuda()
    need("accelerate", "transformers", "safetensors", "pydantic", "msgspec", "yaml")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        found = {}
        for place, visible in (("gpu", None), ("cpu", "")):
            env = os.environ | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
            child = [sys.executable, __file__, "--child", "trained", str(model)]
            done = subprocess.run(child, env=env, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"the step on the {place} failed:\n{done.stderr[-3000:]}")
            found[place] = json.loads(done.stdout.splitlines()[-1])
    gpu, cpu = found["gpu"], found["cpu"]
    metrics = {name: abs(gpu["metrics"][name] - cpu["metrics"][name]) for name in gpu["metrics"]}
    logprobs = [abs(a - b) for a, b in zip(gpu["logprobs"], cpu["logprobs"], strict=True)]
    return {
        "devices": [gpu["device"], cpu["device"]],
        "loss_difference": metrics["actor/pg_loss"],
        "gradient_norm_difference": metrics["actor/grad_norm"],
        "largest_metric_difference": max(metrics.items(), key=lambda found: found[1]),
        "largest_logprob_difference_after": max(logprobs),
        "is_close": max(logprobs) < _TOLERANCE,
        "equal_after_a_sleep": {place: each["is_equal_after_a_sleep"] for place, each in found.items()},
    }


def trained(folder: str) -> dict[str, Any]:
    """One process: a step where it finds itself, then a second one, of a trainer that slept and of one that did not."""
    from stages.rl.trainer import HfTrainer
    from tests.fakes.tiny_policy import make_config, make_rows, write_model

    if not Path(folder).exists():
        write_model(Path(folder), hidden_size=256, intermediate_size=1024, num_hidden_layers=4, initializer_range=0.05)
    straight, rested = (HfTrainer(make_config(folder, trainer__lr=1e-4)) for _ in range(2))
    metrics = straight.train(make_rows(1), 1)
    rested.train(make_rows(1), 1)
    probe = straight.probe()
    rested.sleep()
    rested.wake()
    again = [trainer.train(make_rows(2), 2) for trainer in (straight, rested)]
    return {
        "device": str(next(straight.model.parameters()).device),
        "metrics": metrics,
        "logprobs": probe.logprobs,
        "is_equal_after_a_sleep": again[0] == again[1] and straight.probe() == rested.probe(),
    }


def nccl() -> dict[str, Any]:
    torch = need_cuda()
    if not torch.distributed.is_nccl_available():
        raise Lacking("a PyTorch with NCCL")
    from stages.weights.lines import PIECE_BYTES, StagedLine, nccl_group
    from tests.contracts import lines

    store = torch.distributed.HashStore()
    group = nccl_group(store, 0, 1, 60.0)
    lines.check_line(StagedLine(group, torch.device("cuda:0"), lines.PIECE_BYTES).loop)
    line = StagedLine(group, torch.device("cuda:0"))
    pieces = list(torch.randint(0, 256, (1 << 30,), dtype=torch.uint8).split(PIECE_BYTES))
    arrived = [torch.zeros_like(piece) for piece in pieces]
    loop_s = seconds(lambda: line.loop(pieces, arrived), 3)
    return {
        "contract": "passed",
        "loop_gb_s": (1 << 30) / _GB / loop_s,
        "is_equal": all(map(torch.equal, pieces, arrived)),
        "not_shown": [
            "two ranks: a send and its receive on different devices, over NVLink, PCIe or a network",
            "words between two ends, a refusal, an end that dies or never comes, the limit on a wait",
            "the overlap of a copy to the staging buffer with the transfer of the other half",
        ],
    }


def vllm() -> dict[str, Any]:
    torch = need_cuda()
    need("vllm", "accelerate", "transformers", "safetensors", "pydantic", "msgspec", "yaml")
    from pipeline.config import EngineOptions
    from stages.engines.base import Stored
    from stages.engines.vllm import VllmEngine
    from stages.rl.trainer import HfTrainer
    from tests.fakes.stores import weight_store
    from tests.fakes.tiny_policy import make_config, make_rows, write_model

    found: dict[str, Any] = {}

    def timed(name: str, call: Callable[..., Any], *args: Any) -> Any:
        before, began = torch.cuda.mem_get_info()[0], time.perf_counter()
        result = call(*args)
        torch.cuda.synchronize()
        given_gb = (torch.cuda.mem_get_info()[0] - before) / _GB
        found[name] = {"s": time.perf_counter() - began, "given_back_gb": given_gb}
        return result

    with tempfile.TemporaryDirectory() as folder:
        shape = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
        model = write_model(Path(folder) / "model", num_hidden_layers=4, vocab_size=1024, **shape)
        policy = {"path": str(model), "dtype": "bfloat16"}
        config = make_config(model, model__policy=policy, trainer__lr=1e-3)
        options = EngineOptions(name="vllm", kv_cache_bytes=1 << 30)
        with weight_store(model, "bfloat16") as store:
            trainer = HfTrainer(config)
            stored = Stored(store=store, version=0, wait_s=1.0)
            engine = timed("start", VllmEngine, str(model), "bfloat16", options, 256, stored, 0)
            for version in (1, 2):
                trainer.train(make_rows(version), version)
                trainer.publish(store, 1.0)
                store.seal(version)
                probe = trainer.probe()
                stored = Stored(store=store, version=version, wait_s=1.0)
                if version == 1:
                    timed("update_in_place", engine.load, stored, probe)
                else:
                    timed("sleep", engine.sleep)
                    timed("wake_with_the_next_version", engine.wake, stored, probe)
            engine.close()
    return found | {"probes": "equal: each update was checked by the trainer's own"}


PARTS = {"slot": slot, "offload": offload, "step": step, "nccl": nccl, "vllm": vllm}


# --- running them ---------------------------------------------------------------------------------------------------


def run(name: str) -> dict[str, Any]:
    """The part in a process of its own: {"result": ...}, {"skipped": why} or {"failed": why}."""
    began = time.monotonic()
    child = [sys.executable, __file__, "--child", name]
    try:
        done = subprocess.run(child, capture_output=True, text=True, timeout=LIMITS_S[name], check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"it did not end within {LIMITS_S[name]} s"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"failed": f"exit code {done.returncode}:\n{done.stderr[-3000:]}"}
    found: dict[str, Any] = json.loads(lines[-1])
    return found | {"seconds": round(time.monotonic() - began, 1)}


def child(name: str, args: list[str]) -> None:
    if name == "trained":
        print(json.dumps(trained(*args)))
        return
    try:
        print(json.dumps({"result": PARTS[name]()}))
    except Lacking as lacking:
        print(json.dumps({"skipped": f"needs {lacking}"}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}; by default all")
    parser.add_argument("--out", type=Path, default=OUT / "gpu_one.json")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.parts[0], args.parts[1:])
        return 0
    found: dict[str, Any] = {"python": platform.python_version(), "date": time.strftime("%Y-%m-%d")}
    for name in args.parts or PARTS:
        found[name] = run(name)
        print(name, json.dumps(found[name], indent=1), flush=True)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1))  # after each part: what was measured stays, whatever comes
    return int(any("failed" in part for part in found.values() if isinstance(part, dict)))


if __name__ == "__main__":
    raise SystemExit(main())
