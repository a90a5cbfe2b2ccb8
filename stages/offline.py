"""What is done with a trained model when its run is over: does it load, and how good is it? In a process of its own.

python -m stages.offline JSON     JSON: {what: "check" | "eval", ...}; the answer is the last line of stdout, JSON
"""

import json
import os
import sys
from math import comb
from pathlib import Path
from statistics import fmean
from typing import Any

from pipeline.config import Config, load_resolved

_NUM_PROMPTS, _NUM_TOKENS = 8, 16


def check(told: dict[str, Any]) -> dict[str, Any]:
    """Load the folder with transformers, and with vLLM if asked to, each by its own ways. How many of their greedy
    answers to the run's first prompts are the same, and the largest difference of a logprob in these."""
    config, folder = load_resolved(Path(told["config"])), told["folder"]
    trusted, dtype = config.model.trust_remote_code, config.model.policy.dtype
    prompts = _prompts(config, folder)
    ours = _with_transformers(folder, dtype, prompts, trusted)
    found: dict[str, Any] = {"num_prompts": len(prompts)}
    if told["engine"]:
        from stages.engines.vllm_loaded import greedy

        theirs = greedy(folder, dtype, prompts, _NUM_TOKENS, trusted)
        same = [(one[1], other[1]) for one, other in zip(ours, theirs, strict=True) if one[0] == other[0]]
        gaps = [abs(a - b) for pair in same for a, b in zip(*pair, strict=True)]
        found |= {"num_same": len(same), "largest": max(gaps, default=0.0)}
    return found


def _prompts(config: Config, folder: str) -> list[list[int]]:
    """The first ones of the training data, as the folder's own tokenizer and template render them."""
    from stages.prompts import load_once
    from stages.text import load_tokenizer

    tokenizer = load_tokenizer(folder, config.model.trust_remote_code)
    examples = load_once(tuple(config.data.train_files), config.data.prompt_key)
    return [tokenizer.encode_chat(e.messages) for e in examples.examples(range(min(len(examples), _NUM_PROMPTS)))]


def _with_transformers(
    folder: str, dtype: str, prompts: list[list[int]], trust_remote_code: bool
) -> list[tuple[list[int], list[float]]]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, local_files_only=True, trust_remote_code=trust_remote_code
    ).eval()
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=_NUM_TOKENS,
                do_sample=False,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        tokens = made.sequences[0, len(prompt) :].tolist()
        logprobs = [
            torch.log_softmax(logits[0].float(), -1)[t].item() for logits, t in zip(made.logits, tokens, strict=True)
        ]
        found.append((tokens, logprobs))
    return found


# --- evaluation -----------------------------------------------------------------------------------------------------


def evaluate(told: dict[str, Any]) -> dict[str, Any]:
    """avg@k and pass@k of `samples` answers to each prompt: the mean share of right ones, and the chance that one of k
    is right, without bias (1 - C(n - c, k) / C(n, k) of n answers of which c are right)."""
    from stages.exact import ExactChecker
    from stages.prompts import PromptIds, load_once
    from stages.text import decode_response, load_tokenizer

    config = load_resolved(Path(told["config"]))
    tokenizer = load_tokenizer(told["folder"], config.model.trust_remote_code)
    data = load_once(tuple(told["data"]), config.data.prompt_key)
    examples = data.examples(range(min(len(data), told["num_prompts"] or len(data))))
    prompt_ids = PromptIds(tokenizer, config.data.max_prompt_length)
    answers = _sample(told, config, tokenizer, [prompt_ids.of(example) for example in examples])
    checker, num_right = ExactChecker(told["function"]), []
    for example, of_prompt in zip(examples, answers, strict=True):
        texts = [decode_response(tokenizer, tokens) for tokens, finish in of_prompt if finish == "stop"]
        num_right.append(
            sum(checker.is_right(example.data_source, t, example.ground_truth, example.extra_info) for t in texts)
        )
    n = told["samples"]
    figures = {f"avg@{n}": fmean(right / n for right in num_right)}
    figures |= {f"pass@{k}": fmean(pass_at(k, n, right) for right in num_right) for k in _powers_up_to(n)}
    cut = fmean(finish != "stop" for of_prompt in answers for _, finish in of_prompt)
    return {"num_prompts": len(examples), "samples": n, **figures, "cut_off": cut}


def pass_at(k: int, n: int, num_right: int) -> float:
    return 1.0 - comb(n - num_right, k) / comb(n, k)


def _powers_up_to(n: int) -> list[int]:
    return sorted({2**i for i in range(n.bit_length()) if 2**i <= n} | {n})


def _sample(
    told: dict[str, Any], config: Config, tokenizer: Any, prompts: list[list[int]]
) -> list[list[tuple[list[int], str]]]:
    """(tokens, finish) of each sample to each prompt, by the engine that the run had."""
    from pipeline.gps.store import Store, confine
    from stages.engines.base import Request, Stored
    from stages.engines.vllm import VllmEngine
    from stages.serving import seed_of

    name = f"pivot-{os.getuid()}-eval-{os.getpid()}"
    confine(name)
    length = config.data.max_prompt_length + config.rollout.max_response_length
    store = Store.create(f"{name}-policy", told["folder"], config.model.policy.dtype, 0, 1)
    try:
        engine = VllmEngine(
            told["folder"],
            config.model.policy.dtype,
            config.rollout.engine,
            length,
            Stored(store=store, version=0, wait_s=60.0),
            told["seed"],
            trust_remote_code=config.model.trust_remote_code,
        )
    finally:
        store.unlink()
    made: dict[str, tuple[list[int], str]] = {}
    for number, prompt in enumerate(prompts):
        for sample in range(told["samples"]):
            id = f"{number}-{sample}"
            made[id] = ([], "")
            engine.add(
                Request(
                    id=id,
                    prompt_ids=prompt,
                    max_tokens=config.rollout.max_response_length,
                    temperature=told["temperature"],
                    seed=seed_of(told["seed"], number, sample),
                    stop_ids=tokenizer.stop_ids,
                    logprobs=False,
                )
            )
    while engine.has_unfinished():
        for output in engine.step():
            made[output.id] = (made[output.id][0] + output.tokens, output.finish)
    engine.close()
    return [[made[f"{number}-{sample}"] for sample in range(told["samples"])] for number in range(len(prompts))]


def main(told: dict[str, Any]) -> None:
    from stages.engines.vllm_start import preload

    preload()
    found = {"check": check, "eval": evaluate}[told["what"]](told)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
