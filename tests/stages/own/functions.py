"""What users bring, good and bad. Each takes verl's four arguments."""

import asyncio
import os
import re
import time

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


def exact(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)


def told(data_source, solution_str, ground_truth, extra_info, factor=1.0):
    print("a function may print", flush=True)
    return {"score": factor * extra_info["nested"][0], "length": len(solution_str), "note": data_source}


async def later(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0.05)
    if solution_str == "never":
        await asyncio.sleep(60)
    return 1


async def stubborn(data_source, solution_str, ground_truth, extra_info=None):
    """It blocks the loop: nobody can cancel it."""
    if solution_str == "never":
        time.sleep(60)
    return 1


def odd(data_source, solution_str, ground_truth, extra_info=None):
    match solution_str:
        case "raises":
            raise RuntimeError("a bug of the user's")
        case "hangs":
            while True:
                time.sleep(1)
        case "holds the lock":
            re.match(r"(a+)+$", "a" * 64 + "b")  # never comes back, and never lets another thread run
        case "eats":
            return len([bytearray(1 << 20) for _ in range(4096)])
        case "dies":
            os.abort()
        case "leaves":
            os._exit(0)
        case "interrupts":
            raise SystemExit(3)
        case "nothing":
            return None
        case "nan":
            return float("nan")
        case "text":
            return {"points": 1}
        case "pid":
            return os.getpid()
    return 1.0
