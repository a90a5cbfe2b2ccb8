"""What must happen before vLLM is imported, and its import before a fork. Importing this file imports nothing heavy.

Start cost is import cost: a process with vLLM preloaded starts an engine in well under a second, a fresh one in ten.
"""

import importlib
import sys

_ABSENT = (
    # The CUDA builds of these, which pip brings along, cannot be imported beside a CPU build of torch; with that
    # failure vLLM and some models of transformers cannot be imported either. Nothing here needs them.
    "torchvision",
    "torchaudio",
    "torchcodec",
    # Present only because other packages want them; transformers imports them if it can: seconds, and a thread.
    "sklearn",
    "scipy",
    "cv2",
)

_MODULES = (
    "torch",
    "transformers",
    "vllm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.structured_output",
    "vllm.model_executor.layers.quantization.online.base",  # what every model load imports
    "vllm.model_executor.models.qwen3",  # and with it the layers that most models are made of
    "stages.engines.vllm",
)
_CPU_MODULES = ("vllm.v1.worker.cpu_worker", "vllm.v1.attention.backends.cpu_attn")


def environment(cache: str) -> dict[str, str]:
    """Variables that a process must be started with to run an engine; `cache` is a folder for compiled code.

    They are read while modules are imported, so setting them later does nothing.
    """
    return {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # "auto" pins every engine of a machine to the same core
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",  # it warns of untrue things at each start and update ("Failed to load weights")
        "VLLM_NO_USAGE_STATS": "1",
        "GLOO_SOCKET_IFNAME": "lo",  # an engine of one process listens all the same: not on the network
        "VLLM_CACHE_ROOT": f"{cache}/vllm",
        "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
        "TRITON_CACHE_DIR": f"{cache}/triton",
        "HF_MODULES_CACHE": f"{cache}/modules",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # oneDNN keeps what it compiles for each shape, and shapes vary: without a limit engines grow for ever.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",
        "DNNL_PRIMITIVE_CACHE_CAPACITY": "16",
    }


def hide_broken_packages() -> None:
    """Make imports of packages that break or slow down vLLM and transformers fail at once, as if not installed."""
    for name in _ABSENT:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]


def preload() -> None:
    """Import everything that an engine needs. Afterwards the process still has one thread: it may fork."""
    hide_broken_packages()
    for name in _MODULES:
        importlib.import_module(name)
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        for name in _CPU_MODULES:
            importlib.import_module(name)
        # vLLM looks at a model's class in a fresh process, to keep CUDA out of its own. That process would not know
        # of the hidden packages and fail; on a CPU there is nothing to keep out, so it is done here.
        registry._run_in_subprocess = lambda look: look()
