"""vLLM's own server of OpenAI's chat completions, as a process that imports once and forks it whenever it is to start.

    python -m tests.fakes.vllm_server PORT MODEL      a line of stdin starts it; its pid, which leads its group, is told

The command `vllm serve` of the package for CPUs cannot start (it looks for the version of a package called vllm), and
starts its processes by spawn, which takes a minute each on a busy machine; what serves is the same.
"""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import warnings
from pathlib import Path

from pipeline.processes import python_environment
from stages.engines.vllm_start import environment, preload

_LIMIT_S = 240


class VllmServer:
    """`port` stays what it is over its lives."""

    def __init__(self, model: Path, cache: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self._pid = 0
        self._zygote = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.vllm_server", str(self.port), str(model)],
            cwd=Path(__file__).parents[2],
            env=python_environment(**environment(str(cache))),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self) -> None:
        assert self._zygote.stdin is not None and self._zygote.stdout is not None
        self._zygote.stdin.write("start\n")
        self._zygote.stdin.flush()
        self._pid = int(self._zygote.stdout.readline())
        deadline = time.monotonic() + _LIMIT_S
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1).close()
                return
            except OSError:
                assert time.monotonic() < deadline and self._zygote.poll() is None
                time.sleep(0.05)

    def kill(self) -> None:
        """All of its processes."""
        os.killpg(self._pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self._zygote.communicate(timeout=30)


def main(port: str, model: str) -> None:
    warnings.simplefilter("ignore")  # of vLLM about itself
    preload()
    import uvloop
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from stages.engines.vllm_extension import prepare_cpu

    told = {
        "model": model,
        "served-model-name": "genrm",
        "host": "127.0.0.1",
        "port": port,
        "dtype": "float32",
        "max-model-len": "256",
        "kv-cache-memory-bytes": str(32 << 20),
    }
    arguments = [f"--{name}={value}" for name, value in told.items()]
    parser = make_arg_parser(FlexibleArgumentParser())
    parsed = parser.parse_args([*arguments, "--enforce-eager", "--disable-log-stats", "--disable-uvicorn-access-log"])
    configure = EngineArgs.create_engine_config

    def fork(self: EngineArgs, *args: object, **kwargs: object) -> object:
        config = configure(self, *args, **kwargs)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # a CPU's config sets another one
        return config

    EngineArgs.create_engine_config = fork
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            os.dup2(2, 1)
            prepare_cpu()
            uvloop.run(run_server(parsed))
            os._exit(0)
        print(pid, flush=True)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
