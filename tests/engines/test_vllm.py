"""Weight updates in a live vLLM engine: equal to a fresh engine in every bit, and each part of the update is needed.

Every check runs with the prefix cache on and on prompts that share 300 tokens, which fill two of its blocks.
"""

import gc
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from pipeline.gps.store import Reader, Store
from pipeline.wire_shift import Probe
from stages.engines.base import Engine, Output, Request, Stored
from stages.rl.ranks import Ranks
from stages.weights.publisher import Publisher
from stages.weights.tensors import canonical, views
from tests.engines.tiny import VOCAB_SIZE, Rig, drain, load_vllm, make_model, one_collection, private_bytes, run

pytestmark = pytest.mark.vllm

KINDS = ("moe", "dense", "tied")  # the MoE first: see tests.engines.tiny
SHARED = [3 + (7 * n) % 250 for n in range(300)]


class Lacking(Stored):
    """Without one of its tensors."""

    def __init__(self, store: Store, version: int, left_out: str) -> None:
        super().__init__(store=store, version=version, wait_s=1)
        object.__setattr__(self, "left_out", left_out)

    def read(self) -> Reader:
        reader = Stored.read(self)
        kept = {name: entry for name, entry in reader.entries.items() if name != self.left_out}
        reader.entries = reader.here = kept
        return reader


class World:
    """Per kind of model: its folder, a rig with an engine in which tests can leave a part of the update out."""

    def __init__(self, folder: Path) -> None:
        load_vllm(folder / "cache")
        from stages.engines.vllm import VllmEngine

        class Forgetful(VllmEngine):
            """Leaves out what it is told to."""

            left_out = ""
            keeps_caches = False

            def load(self, stored: Stored, probe: Probe | None = None, *, keep_kv: bool = False) -> None:
                super().load(Lacking(stored.store, stored.version, self.left_out), probe, keep_kv=keep_kv)

            def drop_caches(self) -> None:
                if not self.keeps_caches:
                    super().drop_caches()

        self.kind = VllmEngine
        self.models = {kind: make_model(kind, folder / kind) for kind in KINDS}
        self.rigs = {kind: Rig.create(folder / kind) for kind in KINDS}
        self.engines = {kind: self.rigs[kind].start(Forgetful) for kind in KINDS}
        self.folder = folder

    def close(self) -> None:
        with one_collection():
            for rig in self.rigs.values():
                rig.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("models"))
    yield world
    world.close()


def questions(num: int = 4, max_tokens: int = 8) -> list[Request]:
    """Greedy and sampled, with a long common prefix."""
    return [
        Request(id=f"r{n}", prompt_ids=[*SHARED, 5 + n, 9], max_tokens=max_tokens, temperature=n / 2, seed=n)
        for n in range(num)
    ]


def update(engine: Engine, rig: Rig) -> None:
    engine.load(rig.stored())


def wake(engine: Engine, rig: Rig) -> None:
    engine.wake(rig.stored())


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_in_place_equals_a_fresh_engine(world: World, kind: str) -> None:
    rig, engine = world.rigs[kind], world.engines[kind]
    rig.randomise(1)
    update(engine, rig)
    before = run(engine, questions())
    rig.randomise(2)
    update(engine, rig)  # the second update of an engine goes other ways than the first
    after = run(engine, questions())
    fresh = run(rig.start(world.kind), questions())  # from the store: the model's files hold other weights
    assert after == fresh
    assert all(not set(after[id].logprobs) & set(before[id].logprobs) for id in after)


@pytest.mark.parametrize("kind", KINDS)
def test_a_woken_engine_equals_a_fresh_engine(world: World, kind: str) -> None:
    """The first wake and the second, which goes other ways; and updates go on working."""
    rig, engine = world.rigs[kind], world.engines[kind]
    for seed in (11, 12):
        old = run(engine, questions())
        engine.sleep()
        rig.randomise(seed)
        wake(engine, rig)
        said = run(engine, questions())
        assert said == run(rig.start(world.kind), questions())
        assert all(not set(said[id].logprobs) & set(old[id].logprobs) for id in said)
    rig.randomise(13)
    update(engine, rig)
    assert run(engine, questions()) == run(rig.start(world.kind), questions())


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_weights_and_caches_outlives_its_sleep(world: World, kind: str) -> None:
    """Neither tensors nor packed copies; and what no checkpoint has is not touched."""
    rig, engine = world.rigs[kind], world.engines[kind]
    (model,) = engine._llm.collective_rpc(lambda worker: worker.model_runner.get_model())
    (caches,) = engine._llm.collective_rpc(lambda worker: worker.model_runner.kv_caches)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    packed = [weakref.ref(module.cpu_linear) for module in model.modules() if hasattr(module, "cpu_linear")]
    tensors = [*model.parameters(), *caches]
    assert buffers and len(packed) > 5 and sum(t.untyped_storage().nbytes() for t in tensors) > 32 << 20
    gc.disable()
    engine.sleep()
    assert [made() for made in packed] == [None] * len(packed)
    gc.enable()
    assert {tensor.untyped_storage().nbytes() for tensor in tensors} == {0}
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    wake(engine, rig)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert all(not cache.any() for cache in caches)
    assert [id(tensor) for tensor in (*model.parameters(), *caches)] == [id(tensor) for tensor in tensors]


def test_the_memory_of_weights_goes_back_to_the_system(world: World) -> None:
    """They lie between what stays, where freed memory is kept for later."""
    model = make_model("wide", world.folder / "wide")
    rig = world.rigs["wide"] = Rig.create(world.folder / "wide")
    engine = rig.start(world.kind, kv_cache_bytes=1 << 20)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    for _ in range(3):
        run(engine, questions())
        awake = private_bytes()
        engine.sleep()
        assert awake - private_bytes() > 0.9 * weights > 16 << 20
        wake(engine, rig)


@pytest.mark.parametrize("kind", KINDS)
def test_it_does_not_without_the_reset_of_the_prefix_cache(world: World, kind: str) -> None:
    rig, engine = world.rigs[kind], world.engines[kind]
    run(engine, questions())
    rig.randomise(3)
    engine.keeps_caches = True
    update(engine, rig)
    engine.keeps_caches = False
    stale = run(engine, questions())
    update(engine, rig)
    right = run(engine, questions())
    assert all(stale[id].logprobs[0] != right[id].logprobs[0] for id in right)


@pytest.mark.parametrize("kind", KINDS)
def test_it_does_not_if_any_tensor_is_left_out(world: World, kind: str) -> None:
    """Each time with values that the engine has never seen: memory that is used again must not help it."""
    rig, engine = world.rigs[kind], world.engines[kind]
    names = [name for name in rig.store.entries if ".layers.1." not in name]
    assert len(names) == {"moe": 24, "dense": 14, "tied": 13}[kind]
    unnoticed = []
    for number, name in enumerate(names):
        rig.randomise(100 + number)
        engine.left_out = name
        update(engine, rig)
        partial = run(engine, questions(2, 2))
        engine.left_out = ""
        update(engine, rig)
        whole = run(engine, questions(2, 2))
        assert all(logprob == logprob for said in whole.values() for logprob in said.logprobs)  # no NaN stayed
        if any(partial[id].logprobs == whole[id].logprobs for id in whole):
            unnoticed.append(name)
    assert unnoticed == []


@pytest.mark.parametrize("kind", ["dense", "tied"])
def test_head_and_embedding_arrive_bit_for_bit(world: World, kind: str) -> None:
    rig, engine, model = world.rigs[kind], world.engines[kind], world.models[kind]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    version = rig.store.current() + 1
    Publisher(Ranks()).publish(model.state_dict(), rig.store, version, 1)
    rig.store.seal(version)
    update(engine, rig)

    embedding, head = engine._llm.collective_rpc(embedding_and_head)[0]
    with rig.read() as reader:
        stored = {name: tensor.clone() for name, tensor in views(reader).items()}
    assert ("lm_head.weight" in stored) == (kind == "dense")
    assert torch.equal(embedding, stored["model.embed_tokens.weight"])
    assert torch.equal(embedding, model.get_input_embeddings().weight)
    assert torch.equal(head, stored.get("lm_head.weight", embedding))
    assert torch.equal(head, model.get_output_embeddings().weight)


def embedding_and_head(worker: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What the engine's layers do, not what lies in their parameters: a head answers from a packed copy."""
    model = worker.model_runner.get_model()
    embedding = model.model.embed_tokens(torch.arange(VOCAB_SIZE))
    unit = torch.eye(embedding.shape[1], dtype=embedding.dtype)
    head = model.lm_head.quant_method.apply(model.lm_head, unit)[:, :VOCAB_SIZE]
    return embedding, head.T


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_those_of_the_distribution_sampled_from(world: World, kind: str) -> None:
    """At several temperatures, equal to the tempered log-softmax of the reference implementation."""
    rig, engine, model = world.rigs[kind], world.engines[kind], world.models[kind]
    version = rig.store.current() + 1
    Publisher(Ranks()).publish(dict(model.named_parameters()), rig.store, version, 1)
    rig.store.seal(version)
    update(engine, rig)
    temperatures = {"low": 0.6, "one": 1.0, "high": 1.5}
    requests = [
        Request(id=id, prompt_ids=SHARED[:20], max_tokens=30, temperature=t, seed=3) for id, t in temperatures.items()
    ]
    for id, said in run(engine, requests).items():
        ids = torch.tensor([[*SHARED[:20], *said.tokens]])
        with torch.no_grad():
            logits = model(ids).logits[0, 19:-1]
        expected = (logits / temperatures[id]).log_softmax(-1)
        expected = expected.gather(-1, ids[0, 20:, None])[:, 0]
        assert (torch.tensor(said.logprobs) - expected).abs().max() < 1e-4


def test_kept_caches_are_those_of_the_old_weights(world: World) -> None:
    """What is said after an update is what new weights say over the keys and values that old ones computed."""
    from transformers import DynamicCache  # only once vLLM is loaded

    rig, model = world.rigs["dense"], world.models["dense"]
    engine = rig.start(world.kind, enable_prefix_caching=False)
    request = Request(id="a", prompt_ids=SHARED[:40], max_tokens=12, seed=3)
    engine.add(request)
    before = [output for _ in range(6) for output in engine.step()]
    cache = DynamicCache()
    tokens = [token for output in before for token in output.tokens]
    with torch.no_grad():
        with rig.read() as reader:
            model.load_state_dict(views(reader))
        model(torch.tensor([[*request.prompt_ids, *tokens[:-1]]]), past_key_values=cache)
        rig.randomise(7)
        engine.load(rig.stored(), keep_kv=True)
        with rig.read() as reader:
            model.load_state_dict(views(reader))
        rest = drain(engine)["a"]
        fed = torch.tensor([[tokens[-1], *rest.tokens[:-1]]])
        kept = model(fed, past_key_values=cache).logits[0].log_softmax(-1)
        recomputed = model(torch.tensor([[*request.prompt_ids, *tokens, *rest.tokens[:-1]]])).logits[0, -6:]
    logprobs = torch.tensor(rest.logprobs)
    of = torch.tensor(rest.tokens)[:, None]
    assert (logprobs - kept.gather(-1, of)[:, 0]).abs().max() < 1e-4
    assert (logprobs - recomputed.log_softmax(-1).gather(-1, of)[:, 0]).abs().max() > 1e-2
    assert (rest.finish, rest.version - rest.kv_version) == ("length", 1)


def test_the_probe_makes_room_for_itself_where_kept_caches_fill_the_memory(world: World) -> None:
    """Its answer does not wait for the end of others; the youngest gives way and begins anew, with all its tokens."""
    rig, model = world.rigs["dense"], world.models["dense"]
    engine = rig.start(world.kind, enable_prefix_caching=False, kv_cache_bytes=1 << 20)  # eight blocks, one void
    said: dict[str, list[Output]] = {"three": [], "three more": [], "one": []}
    for id, length in zip(said, (270, 270, 90), strict=True):
        engine.add(Request(id=id, prompt_ids=SHARED[:length], max_tokens=20, seed=1))
    for _ in range(6):
        for output in engine.step():
            said[output.id].append(output)
    assert {len(outputs) for outputs in said.values()} == {6}
    rig.randomise(9)
    with rig.read() as reader:
        model.load_state_dict(views(reader))
    with torch.no_grad():
        best = model(torch.tensor([[7, 8]])).logits[0, -1].log_softmax(-1).max(-1)
    probe = Probe(prompts=[[7, 8]], tokens=[int(best.indices)], logprobs=[float(best.values)], tolerance=1e-4)
    engine.load(rig.stored(), probe, keep_kv=True)
    while engine.has_unfinished():
        for output in engine.step():
            said[output.id].append(output)
    assert [sum(len(o.tokens) for o in outputs) for outputs in said.values()] == [20, 20, 20]
    ages = [{o.version - (o.version if o.kv_version is None else o.kv_version) for o in said[id][6:]} for id in said]
    assert ages == [{1}, {1}, {0}]


def test_caches_are_not_kept_beside_a_prefix_cache(world: World) -> None:
    rig, engine = world.rigs["dense"], world.engines["dense"]
    engine.add(questions()[0])
    engine.step()
    version = engine.version
    rig.randomise(8)
    with pytest.raises(RuntimeError, match="beside a prefix cache"):
        engine.load(rig.stored(), keep_kv=True)
    assert engine.version == version
    engine.abort()


def test_more_prompts_than_one_step_takes_are_served_with_their_seeds(world: World) -> None:
    """As after the abort of many: a step computes some thousands of tokens, and a prompt may be the one too many."""
    engine = world.engines["dense"]
    asked = [
        Request(id=f"r{n}", prompt_ids=[3 + (n * k) % 250 for k in range(1, 450)], max_tokens=6, seed=n)
        for n in range(1, 12)
    ]
    together = run(engine, asked)
    for request in asked:
        alone = run(engine, [request])[request.id]
        assert (together[request.id].tokens, together[request.id].finish) == (alone.tokens, "length")


@pytest.mark.parametrize("kind", ["moe", "tied"])
def test_bfloat16_too(world: World, kind: str) -> None:
    rig = world.rigs[f"{kind} in bfloat16"] = Rig.create(world.folder / kind, "bfloat16")
    engine = rig.start(world.kind)
    rig.randomise(5)
    update(engine, rig)
    assert run(engine, questions()) == run(rig.start(world.kind), questions())
    engine.sleep()
    rig.randomise(6)
    wake(engine, rig)
    assert run(engine, questions()) == run(rig.start(world.kind), questions())


@pytest.mark.parametrize("change", ["lost", "unknown"])
def test_it_does_not_start_from_other_weights_than_the_models(world: World, change: str, tmp_path: Path) -> None:
    shutil.copytree(world.folder / "dense", tmp_path / "model")
    tensors = safetensors.torch.load_file(world.folder / "dense/model.safetensors")
    norm = tensors["model.norm.weight"]
    if change == "lost":
        del tensors["model.norm.weight"]
    else:
        tensors["model.norms.weight"] = norm.clone()
    safetensors.torch.save_file(tensors, tmp_path / "model/model.safetensors")
    rig = world.rigs[change] = Rig.create(tmp_path / "model")
    with pytest.raises(ValueError, match="norm"):
        rig.start(world.kind)


def test_structured_outputs_only_if_started_for_them(world: World) -> None:
    engine = world.engines["dense"]
    with pytest.raises(ValueError, match="not started for structured outputs"):
        engine.add(Request(id="a", prompt_ids=[5], max_tokens=3, choices=["yes", "no"]))
    assert not engine.has_unfinished()


def test_experts_have_the_names_of_their_files(world: World) -> None:
    model = world.models["moe"]
    file = safetensors.torch.load_file(world.folder / "moe/model.safetensors")
    named = canonical(model.state_dict())
    assert named.keys() == file.keys() and any(".experts.3.up_proj" in name for name in named)
