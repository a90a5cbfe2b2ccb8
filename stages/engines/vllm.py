"""vLLM behind the engine port: one thread of this process, weights from the GPS alone.

Tokens go in and out as ids. After each `step` vLLM is at a token boundary (nothing is in flight), and all tokens
that it made have been returned: an abort loses nothing.
"""

import os
import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMClientError
from vllm.inputs import tokens_input
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine.llm_engine import LLMEngine

from pipeline.config_engine import EngineOptions
from pipeline.core.errors import UpdateRefused
from pipeline.wire_shift import Probe
from stages.engines import counters
from stages.engines.base import EngineCounts, Output, Request, Stored, Work
from stages.engines.check import check_request, must_be_able_to_sleep, must_be_asleep, must_be_awake
from stages.engines.counters import Costly
from stages.engines.vllm_extension import (
    LOAD_FORMAT,
    alone,
    has_cache,
    prepare_cpu,
    reads_directly,
    reload_weights,
    remove_rendezvous_file,
    scheduler_of,
)
from stages.engines.vllm_memory import CpuMemory, CudaMemory, Memory
from stages.engines.vllm_ranks import Ranks, costly_so_far, on_each, sharing
from stages.engines.vllm_scheduler import TellingScheduler
from stages.weights.compare import differing
from stages.weights.tensors import table_of

_PROBE_ID = "probe-"
_PROBE_TOP = 5


class VllmEngine:
    """One engine: in this process, or with `ranks` > 1, tensor parallel, in as many that this one forks.

    `model_path`: the folder of config.json and, if `structured`, the tokenizer; its weight files are not read.
    `structured`: whether requests may have `choices` or `regex`. `seed`: of requests without one of their own.
    `can_sleep`: on CUDA, its memory comes from another allocator then. `reads_directly`: whether updates go from the
    store straight into parameters. `name`: no other engine of this machine has it (see vllm_ranks.sharing). Weights and
    caches are cut up between ranks, which each have a slot's device: `options.kv_cache_bytes` are those of all.

    With several ranks no Reader may be open in this process when it is made: a lock would be theirs, too.
    """

    def __init__(
        self,
        model_path: str,
        dtype: str,
        options: EngineOptions,
        max_model_len: int,
        stored: Stored,
        seed: int,
        *,
        structured: bool = False,
        trust_remote_code: bool = False,
        can_sleep: bool = False,
        ranks: int = 1,
        name: str = "",
    ) -> None:
        on_cpu = current_platform.is_cpu()
        if on_cpu:
            prepare_cpu()
        arguments = _start_arguments(options, ranks, on_cpu=on_cpu) | {
            "model": model_path,
            "dtype": dtype,
            "max_model_len": max_model_len,
            "seed": seed,
            "skip_tokenizer_init": not structured,
            "trust_remote_code": trust_remote_code,
            "model_loader_extra_config": {"stored": stored},
            "enable_sleep_mode": can_sleep and not on_cpu,
            **options.options,
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of vLLM about itself
            config = EngineArgs(**arguments).create_engine_config()
            with sharing(f"{name or f'pivot-{os.getuid()}-{os.getpid()}'}-ranks-") if ranks > 1 else nullcontext():
                self._llm = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        remove_rendezvous_file()
        self.reads_directly = all(on_each(self._llm, reads_directly))
        self._costly: Costly | None = Costly() if ranks > 1 else None  # of its ranks, so far
        self._hear_ranks()
        self._table = table_of(stored.store)
        self._max_model_len = max_model_len
        self._vocab_size = config.model_config.get_vocab_size()
        self._structured = structured
        self._caches_prefixes = bool(config.cache_config.enable_prefix_caching)
        self._unfinished: dict[str, str] = {}  # and what vLLM calls them
        self._kept: dict[str, int] = {}  # whose caches are older than the weights, and how old they may be
        self._num_tokens = 0
        self._work = Work()
        self._can_sleep = can_sleep
        self._memory: Memory = CpuMemory(self._llm) if on_cpu else CudaMemory(self._llm)
        self.is_asleep = False
        cache = self._llm.vllm_config.cache_config
        self.kv_tokens = (cache.num_gpu_blocks - 1) * cache.block_size  # vLLM keeps one block for nothing
        self.version = stored.version
        if can_sleep:
            self._warm_up()

    def add(self, request: Request) -> None:
        must_be_awake(self)
        check_request(request, max_model_len=self._max_model_len, vocab_size=self._vocab_size)
        if request.id in self._unfinished:
            raise ValueError(f"request {request.id} is already here")
        forced = bool(request.choices or request.regex)
        if forced and not self._structured:
            raise ValueError(f"request {request.id}: this engine was not started for structured outputs")
        parameters = SamplingParams(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            seed=request.seed,
            stop_token_ids=list(request.stop_ids),
            ignore_eos=not forced,  # only stop_ids stop; a grammar that is complete allows nothing but the end
            logprobs=0 if request.logprobs else None,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            structured_outputs=_structure(request) if forced else None,
        )
        try:
            name = self._llm.add_request(request.id, tokens_input(list(request.prompt_ids)), parameters)
        except VLLMClientError as error:
            raise ValueError(f"request {request.id}: {error}") from error
        self._unfinished[request.id] = name

    def step(self) -> list[Output]:
        must_be_awake(self)
        if not self._unfinished:
            return []
        outputs = [self._output(made) for made in self._llm.step()]
        for output in outputs:
            self._num_tokens += len(output.tokens)
            if output.finish:
                self._forget([output.id])
        scheduler = scheduler_of(self._llm)
        self._work = Work(batch=len(outputs), context=scheduler.context, prefill_tokens=scheduler.prefill_tokens)
        return outputs

    def work(self) -> Work:
        return self._work

    def has_unfinished(self) -> bool:
        return bool(self._unfinished)

    def abort(self, ids: Sequence[str] | None = None) -> list[Output]:
        aborted = sorted(self._unfinished if ids is None else self._unfinished.keys() & set(ids))
        self._llm.abort_request(aborted)
        self._forget(aborted)
        return [Output(id=id, version=self.version, finish="abort") for id in aborted]

    def load(self, stored: Stored, probe: Probe | None = None, *, keep_kv: bool = False) -> None:
        must_be_awake(self)
        if self._unfinished and not keep_kv:
            raise RuntimeError(f"weights cannot change under {len(self._unfinished)} unfinished requests")
        if self._unfinished and self._caches_prefixes:
            raise RuntimeError("caches cannot be kept beside a prefix cache: it would hand them to new requests")
        self._must_fit(stored)
        on_each(self._llm, reload_weights, stored)
        if not self._unfinished:
            self.drop_caches()
        before, self.version = self.version, stored.version
        if probe is not None:
            self._check(probe)
        for id, name in self._unfinished.items():
            if has_cache(self._llm, name):
                self._kept.setdefault(id, before)
            else:
                self._kept.pop(id, None)

    def sleep(self) -> None:
        must_be_able_to_sleep(self, self._can_sleep)
        self.drop_caches()
        with counters.shift():
            self._memory.release()
            self._hear_ranks()
        self.is_asleep = True

    def wake(self, stored: Stored, probe: Probe | None = None) -> dict[str, float]:
        must_be_asleep(self)
        started = time.monotonic()
        self._must_fit(stored)
        with counters.shift():
            self._memory.take_weights(stored)
            read = time.monotonic()
            self._memory.take_caches()
            self._hear_ranks()
        self.is_asleep, self.version = False, stored.version
        if probe is not None:
            self._check(probe)
        return {"read": read - started, "cache": time.monotonic() - read}

    def drop_caches(self) -> None:
        """Forget everything computed with old weights: a seam, by which tests show that it is needed."""
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be reset: some of its blocks are still in use")

    def counts(self) -> EngineCounts:
        scheduler = scheduler_of(self._llm)
        running, waiting = scheduler.get_request_counts()
        held = scheduler.held_tokens
        return EngineCounts(running=running, waiting=waiting, num_tokens=self._num_tokens, held_tokens=held)

    def close(self) -> None:
        """Free the engine. A process has one: this also ends what engines of a process share."""
        self._llm.engine_core.shutdown()

    def _warm_up(self) -> None:
        """Do now what vLLM leaves to the first requests of a process, for .2 s: in a shift, somebody waits for them."""
        for number in range(2):
            regex = ".+" if self._structured else ""
            self.add(Request(id=f"warm-{number}", prompt_ids=[0, 0], max_tokens=2, seed=number, regex=regex))
        while self._unfinished:
            self.step()
        self.drop_caches()
        self._num_tokens, self._work = 0, Work()

    def _hear_ranks(self) -> None:
        if self._costly is not None:
            before, self._costly = self._costly, sum(on_each(self._llm, costly_so_far), Costly())
            counters.hear(self._costly - before)

    def _must_fit(self, stored: Stored) -> None:
        if differences := differing(table_of(stored.store), self._table):
            raise UpdateRefused(f"version {stored.version} does not fit the engine: {differences}")

    def _check(self, probe: Probe) -> None:
        """The trainer's greedy token must be, within the tolerance, a most likely one with the trainer's logprob."""
        parameters = SamplingParams(max_tokens=1, temperature=0, logprobs=_PROBE_TOP, detokenize=False, ignore_eos=True)
        answers: dict[str, dict[int, float]] = {}
        with alone(self._llm, len(probe.prompts)) as make_room:
            for number, prompt in enumerate(probe.prompts):
                self._llm.add_request(f"{_PROBE_ID}{number}", tokens_input(prompt), parameters)
            while len(answers) < len(probe.prompts):
                outputs = self._llm.step()
                for made in outputs:
                    answers[made.request_id] = {token: p.logprob for token, p in made.outputs[0].logprobs[0].items()}
                if not outputs:
                    make_room()
        for number, (token, expected) in enumerate(zip(probe.tokens, probe.logprobs, strict=True)):
            likely = answers[f"{_PROBE_ID}{number}"]
            got, best = likely.get(token), max(likely.values())
            if got is None or abs(got - expected) > probe.tolerance or best - got > probe.tolerance:
                raise RuntimeError(
                    f"version {self.version} is not the trainer's: after probe prompt {number} token {token} should "
                    f"be the most likely with logprob {expected:.6f}, but the engine has {got} for it and {best:.6f} "
                    f"for its own (tolerance {probe.tolerance:g})"
                )

    def _output(self, made: RequestOutput) -> Output:
        new = made.outputs[0]
        tokens = list(new.token_ids)
        logprobs = [of[token].logprob for of, token in zip(new.logprobs, tokens, strict=True)] if new.logprobs else []
        return Output(
            id=made.request_id,
            version=self.version,
            kv_version=self._kept.get(made.request_id),
            tokens=tokens,
            logprobs=logprobs,
            finish=new.finish_reason or "",
            num_cached=made.num_cached_tokens or 0,
        )

    def _forget(self, ids: Sequence[str]) -> None:
        for id in ids:
            del self._unfinished[id]
            self._kept.pop(id, None)


def _start_arguments(options: EngineOptions, ranks: int, *, on_cpu: bool) -> dict[str, Any]:
    """What is the same for all engines of a kind."""
    return {
        "max_num_seqs": options.max_num_seqs,
        "kv_cache_memory_bytes": options.kv_cache_bytes // ranks,
        "tensor_parallel_size": ranks,
        "distributed_executor_backend": Ranks if ranks > 1 else None,
        "enable_prefix_caching": options.enable_prefix_caching,
        "load_format": LOAD_FORMAT,
        "generation_config": "vllm",  # sampling comes from the request alone, never from the model's folder
        "logprobs_mode": "processed_logprobs",  # of the distribution sampled from: after temperature
        "async_scheduling": False,  # else a step's tokens are still in flight when it returns
        "scheduler_cls": TellingScheduler,
        # A prompt that is cut between two steps has its generator turned back, which a CPU's cannot be.
        "enable_chunked_prefill": False if on_cpu else None,
        "enforce_eager": on_cpu,
        "disable_log_stats": True,
    }


def _structure(request: Request) -> StructuredOutputsParams:
    if request.choices:
        return StructuredOutputsParams(choice=list(request.choices))
    return StructuredOutputsParams(regex=request.regex)
