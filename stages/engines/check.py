"""What every engine refuses, in the same words."""

from stages.engines.base import Engine, Request


def check_request(request: Request, *, max_model_len: int, vocab_size: int) -> None:
    """Raises ValueError for a request that can never be served. One whose `max_tokens` lead past `max_model_len` is
    served up to there."""
    prompt = request.prompt_ids
    if not prompt:
        raise ValueError(f"request {request.id}: the prompt is empty")
    if len(prompt) >= max_model_len:
        raise ValueError(
            f"request {request.id}: the prompt has {len(prompt)} tokens, at most {max_model_len - 1} leave room for one"
        )
    if not 0 <= min(prompt) <= max(prompt) < vocab_size:
        raise ValueError(f"request {request.id}: token ids must be in [0, {vocab_size})")
    if request.max_tokens < 1:
        raise ValueError(f"request {request.id}: max_tokens is {request.max_tokens}, at least 1 is valid")
    if request.temperature < 0:
        raise ValueError(f"request {request.id}: temperature is {request.temperature}, at least 0 is valid")
    if request.choices and request.regex:
        raise ValueError(f"request {request.id}: choices and regex exclude each other")


def must_be_awake(engine: Engine) -> None:
    if engine.is_asleep:
        raise RuntimeError("the engine sleeps: it has neither weights nor caches")


def must_be_asleep(engine: Engine) -> None:
    if not engine.is_asleep:
        raise RuntimeError("the engine is awake")


def must_be_able_to_sleep(engine: Engine, can_sleep: bool) -> None:
    must_be_awake(engine)
    if not can_sleep:
        raise RuntimeError("this engine was not started to sleep (can_sleep)")
    if engine.has_unfinished():
        counts = engine.counts()
        raise RuntimeError(f"an engine cannot sleep under {counts.running + counts.waiting} unfinished requests")
