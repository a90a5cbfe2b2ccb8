"""vLLM as anybody would start it on a folder: its own loader, its own tokenizer settings, nothing of the run's."""

import warnings
from collections.abc import Sequence

from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

_KV_BYTES = 64 << 20


def greedy(
    folder: str, dtype: str, prompts: Sequence[Sequence[int]], num_tokens: int, trust_remote_code: bool
) -> list[tuple[list[int], list[float]]]:
    """The first tokens of each answer, and their logprobs. `dtype` is said: by itself vLLM halves float32."""
    longest = max(map(len, prompts)) + num_tokens
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of vLLM about itself
        arguments = EngineArgs(
            model=folder,
            dtype=dtype,
            max_model_len=longest,
            max_num_seqs=len(prompts),
            kv_cache_memory_bytes=_KV_BYTES,
            trust_remote_code=trust_remote_code,
            enforce_eager=True,
            disable_log_stats=True,
        )
        llm = LLMEngine.from_vllm_config(arguments.create_engine_config(), disable_log_stats=True)
    parameters = SamplingParams(
        max_tokens=num_tokens, temperature=0, logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )
    for number, prompt in enumerate(prompts):
        llm.add_request(str(number), tokens_input(list(prompt)), parameters)
    found: dict[str, tuple[list[int], list[float]]] = {}
    while len(found) < len(prompts):
        for made in (output for output in llm.step() if output.finished):
            tokens, logprobs = list(made.outputs[0].token_ids), made.outputs[0].logprobs
            chosen = [of[token].logprob for of, token in zip(logprobs, tokens, strict=True)]
            found[made.request_id] = tokens, chosen
    llm.engine_core.shutdown()
    return [found[str(number)] for number in range(len(prompts))]
