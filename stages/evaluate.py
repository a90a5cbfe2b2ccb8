"""Evaluate: the policy answers held-out prompts, and an exact checker that training never sees counts what is right."""

import queue
from collections.abc import Iterator

from pipeline.config import Config
from pipeline.core.errors import StageFailed
from pipeline.data import Example
from pipeline.stage import StageResult, StageSpec, TaskContext
from stages.engines.base import Output, Request
from stages.engines.host import EngineHost
from stages.exact import ExactChecker
from stages.prompts import PromptIds, load_once
from stages.serving import seed_of
from stages.text import decode_response


def evaluate(task: TaskContext, spec: StageSpec) -> StageResult:
    """`val/acc`: the share of right answers among `evaluate.samples` to each of the first `evaluate.num_prompts` rows.

    Prompts and seeds are the same at every step. An answer that was cut off is wrong. Raises StageFailed if the
    engine answers with another version, refuses a prompt, or stays silent for `limits.stage_s`.
    """
    worker, config = task.worker, task.worker.config
    checker = ExactChecker(config.evaluate.function)
    prompt_ids = PromptIds(worker.tokenizer, config.data.max_prompt_length)
    examples: dict[str, Example] = {}
    requests = []
    held_out = load_once(tuple(config.data.val_files), config.data.prompt_key)
    for example in held_out.examples(range(min(len(held_out), config.evaluate.num_prompts))):
        for sample in range(config.evaluate.samples):
            request = _request(config, spec, worker.tokenizer.stop_ids, prompt_ids.of(example), example.row, sample)
            examples[request.id] = example
            requests.append(request)
    num_right = 0
    for id, finish, tokens in _generate(worker.engine, requests, spec, config.limits.stage_s):
        if finish not in ("stop", "length"):
            raise StageFailed(f"evaluation {id} of {examples[id].place} ended with {finish!r}, {len(tokens)} tokens")
        example, response = examples[id], decode_response(worker.tokenizer, tokens)
        num_right += finish == "stop" and checker.is_right(
            example.data_source, response, example.ground_truth, example.extra_info
        )
    return {"metrics": {"val/acc": num_right / len(requests)}, "num": len(requests)}


def _request(
    config: Config, spec: StageSpec, stop_ids: tuple[int, ...], prompt_ids: list[int], row: int, sample: int
) -> Request:
    return Request(
        id=f"{spec.task}/{row}-{sample}",
        prompt_ids=prompt_ids,
        max_tokens=config.rollout.max_response_length,
        temperature=config.rollout.temperature,
        seed=seed_of(config.evaluate.seed, row, sample),
        stop_ids=stop_ids,
        logprobs=False,
    )


def _generate(
    engine: EngineHost, requests: list[Request], spec: StageSpec, limit_s: float
) -> Iterator[tuple[str, str, list[int]]]:
    """(id, finish, tokens) of each request, as they end; all of the spec's version."""
    outbox: queue.SimpleQueue[Output] = queue.SimpleQueue()
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    engine.submit(requests, outbox)
    try:
        while tokens:
            try:
                output = outbox.get(timeout=limit_s)
            except queue.Empty:
                raise StageFailed(f"the engine was silent for {limit_s:g} s, {len(tokens)} evaluations open") from None
            if output.version != spec.version:
                raise StageFailed(f"{spec.task} is for version {spec.version}, the engine has {output.version}")
            tokens[output.id] += output.tokens
            if output.finish:
                yield output.id, output.finish, tokens.pop(output.id)
    finally:
        engine.abort(list(tokens))  # those that nobody waits for any more
