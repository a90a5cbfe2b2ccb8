"""What every engine promises. One suite, run on each implementation; sleep and wake are in test_engine_sleep.py."""

import re

import pytest

from pipeline.core.errors import UpdateRefused
from stages.engines.base import Engine
from tests.contracts.engine_case import MAX_NUM_SEQS, Case, a_request
from tests.engines.tiny import MAX_MODEL_LEN, VOCAB_SIZE, collect, drain, run


def test_tokens_stream_as_deltas_up_to_the_limit(engine: Engine) -> None:
    requests = [a_request(f"r{n}", seed=n, max_tokens=3 + 2 * n) for n in range(3)]
    for request in requests:
        engine.add(request)
    pieces: dict[str, list[int]] = {}
    said = {}
    while engine.has_unfinished():
        outputs = engine.step()
        assert outputs and len({o.id for o in outputs}) == len(outputs)
        assert {(o.version, o.kv_version) for o in outputs} == {(engine.version, None)}
        for output in outputs:
            assert output.tokens and len(output.logprobs) == len(output.tokens)
            pieces.setdefault(output.id, []).append(len(output.tokens))
        collect(said, outputs)
    assert {o.id: (len(o.tokens), o.finish) for o in said.values()} == {
        r.id: (r.max_tokens, "length") for r in requests
    }
    assert all(len(of) > 1 for of in pieces.values())
    assert all(0 <= token < VOCAB_SIZE for o in said.values() for token in o.tokens)
    assert all(logprob <= 0 for o in said.values() for logprob in o.logprobs)
    assert engine.step() == []


def test_a_response_ends_where_the_model_is_full(engine: Engine) -> None:
    prompt = [3 + n % 200 for n in range(MAX_MODEL_LEN - 5)]
    said = run(engine, [a_request(prompt_ids=prompt, max_tokens=100)])["a"]
    assert (len(said.tokens), said.finish) == (5, "length")


def test_it_stops_at_the_stop_ids_and_returns_the_one_that_stopped_it(engine: Engine) -> None:
    stops = tuple(range(2, VOCAB_SIZE, 2))
    said = run(engine, [a_request(f"r{n}", seed=n, max_tokens=400, stop_ids=stops) for n in range(4)])
    for output in said.values():
        assert output.finish == "stop" and output.tokens[-1] in stops
        assert not set(output.tokens[:-1]) & set(stops)
    assert all(len(o.tokens) == len(o.logprobs) for o in said.values())


def test_nothing_but_the_stop_ids_stops_it(case: Case, engine: Engine) -> None:
    """Not even the model's own end token, which comes up among 1,600 random ones."""
    said = run(engine, [a_request(f"r{n}", seed=n, max_tokens=400, temperature=2.0) for n in range(4)])
    assert {(len(o.tokens), o.finish) for o in said.values()} == {(400, "length")}
    if not case.is_emulated:
        assert any(2 in o.tokens for o in said.values())


def test_a_seed_repeats_whatever_runs_beside_it(engine: Engine) -> None:
    alone = run(engine, [a_request()])["a"]
    together = run(engine, [a_request("x", seed=1), a_request("a"), a_request("y", prompt_ids=[9] * 40, seed=2)])
    assert together["a"].tokens == alone.tokens
    assert together["a"].logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    assert together["x"].tokens != alone.tokens


def test_greedy_is_the_same_whatever_the_seed(engine: Engine) -> None:
    said = run(engine, [a_request(f"r{n}", seed=seed, temperature=0.0) for n, seed in enumerate((1, 2, None))])
    assert len({tuple(o.tokens) for o in said.values()}) == 1


def test_without_a_seed_each_request_is_another(engine: Engine) -> None:
    said = run(engine, [a_request(f"r{n}", seed=None) for n in range(3)])
    assert len({tuple(o.tokens) for o in said.values()}) == 3


def test_logprobs_only_when_asked_for(engine: Engine) -> None:
    said = run(engine, [a_request("with"), a_request("without", logprobs=False)])
    assert len(said["with"].logprobs) == 12
    assert said["without"].logprobs == [] and said["without"].tokens == said["with"].tokens


def test_abort_returns_everything_wherever_a_request_is(engine: Engine) -> None:
    wanted = run(engine, [a_request(f"r{n}", seed=n, max_tokens=40) for n in range(MAX_NUM_SEQS + 3)])
    for n in range(MAX_NUM_SEQS + 2):
        engine.add(a_request(f"r{n}", seed=n, max_tokens=40))
    said: dict = {}
    for _ in range(5):
        collect(said, engine.step())
    engine.add(a_request(f"r{MAX_NUM_SEQS + 2}", seed=MAX_NUM_SEQS + 2, max_tokens=40))  # never seen by a step
    counts = engine.counts()
    assert (counts.running, counts.running + counts.waiting) == (MAX_NUM_SEQS, MAX_NUM_SEQS + 3)
    aborted = engine.abort()
    assert sorted(o.id for o in aborted) == sorted(wanted)
    collect(said, aborted)
    for id, output in said.items():
        assert output.finish == "abort" and len(output.logprobs) == len(output.tokens)
        assert output.version == engine.version
        assert output.tokens == wanted[id].tokens[: len(output.tokens)]
    assert sorted(len(o.tokens) for o in said.values()) == [0] * 3 + [5] * MAX_NUM_SEQS
    assert not engine.has_unfinished() and engine.step() == [] and engine.abort() == []
    assert (engine.counts().running, engine.counts().waiting) == (0, 0)


def test_abort_of_some_leaves_the_others_alone(engine: Engine) -> None:
    wanted = run(engine, [a_request(f"r{n}", seed=n) for n in range(3)])
    for n in range(3):
        engine.add(a_request(f"r{n}", seed=n))
    said: dict = {}
    collect(said, engine.step())
    collect(said, engine.abort(["r1", "never heard of"]))
    while engine.has_unfinished():
        collect(said, engine.step())
    assert said["r1"].finish == "abort" and said["r1"].tokens == wanted["r1"].tokens[:1]
    assert [said[id].tokens for id in ("r0", "r2")] == [wanted[id].tokens for id in ("r0", "r2")]
    again = run(engine, [a_request("r1", seed=1)])["r1"]  # the id is free again
    assert again.tokens == wanted["r1"].tokens


def test_more_requests_than_fit_are_all_served(engine: Engine) -> None:
    said = run(engine, [a_request(f"r{n:02}", seed=n) for n in range(3 * MAX_NUM_SEQS)])
    assert len(said) == 3 * MAX_NUM_SEQS and all(len(o.tokens) == 12 for o in said.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_ids": []}, "empty"),
        ({"prompt_ids": [3] * MAX_MODEL_LEN}, "512 tokens"),
        ({"prompt_ids": [VOCAB_SIZE]}, "token ids"),
        ({"prompt_ids": [-1]}, "token ids"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"choices": ["x"], "regex": "x"}, "exclude"),
    ],
)
def test_what_can_never_be_served_is_refused(engine: Engine, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine.add(a_request(**changes))
    assert not engine.has_unfinished()


def test_an_id_is_taken_while_its_request_lives(engine: Engine) -> None:
    engine.add(a_request())
    with pytest.raises(ValueError, match="already"):
        engine.add(a_request())
    assert list(drain(engine)) == ["a"]


def test_choices_and_nothing_else(engine: Engine) -> None:
    choices = ["yes", "no", "perhaps"]
    requests = [a_request(f"r{n}", prompt_ids=[1, 70 + n], seed=n, choices=choices, stop_ids=(2,)) for n in range(3)]
    for output in run(engine, requests).values():
        assert output.finish == "stop" and output.tokens[-1] == 2
        assert bytes(token - 3 for token in output.tokens[:-1]).decode() in choices


def test_a_regex_is_matched_or_refused(case: Case, engine: Engine) -> None:
    asked = a_request(regex=r"[a-z]{3,9}\nVerdict: (yes|no)", max_tokens=40, stop_ids=(2,))
    if case.is_emulated:  # it does not make texts up to fit
        with pytest.raises(ValueError, match="says nothing that fits"):
            engine.add(asked)
        return
    said = run(engine, [asked])["a"]
    assert re.fullmatch(asked.regex, bytes(token - 3 for token in said.tokens[:-1]).decode())
    assert said.finish == "stop" and said.tokens[-1] == 2


def test_a_new_version_answers_differently_and_says_so(case: Case, engine: Engine) -> None:
    before = run(engine, [a_request(temperature=0.0)])["a"]
    version = case.update()
    assert engine.version == version
    after = run(engine, [a_request(temperature=0.0)])["a"]
    assert not set(after.logprobs) & set(before.logprobs)
    assert (before.version, after.version) == (version - 1, version)


def test_weights_do_not_change_under_a_request(case: Case, engine: Engine) -> None:
    engine.add(a_request())
    engine.step()
    version = engine.version
    case.new_version()
    with pytest.raises(RuntimeError, match="weights cannot change"):
        engine.load(case.rig.stored())
    assert engine.version == version
    engine.abort()
    engine.load(case.rig.stored())
    assert engine.version == case.rig.store.current()


@pytest.mark.parametrize("has_probe", [False, True])
def test_weights_change_under_requests_that_keep_their_caches(case: Case, engine: Engine, has_probe: bool) -> None:
    """Every token says which weights made it and how old the caches were; none is lost, and the probe makes none."""
    before = engine.version
    for n in range(MAX_NUM_SEQS + 2):
        engine.add(a_request(f"r{n}", seed=n, max_tokens=20))
    said = {f"r{n}": [] for n in range(MAX_NUM_SEQS + 3)}
    for _ in range(5):
        for output in engine.step():
            said[output.id].append(output)
    after = case.new_version()
    engine.load(case.rig.stored(), case.probe() if has_probe else None, keep_kv=True)
    engine.add(a_request(f"r{MAX_NUM_SEQS + 2}", max_tokens=20))
    while engine.has_unfinished():
        for output in engine.step():
            said[output.id].append(output)
    num_kept = 0
    for n, outputs in enumerate(said.values()):
        assert sum(len(o.tokens) for o in outputs) == sum(len(o.logprobs) for o in outputs) == 20
        assert [o.finish for o in outputs] == [""] * (len(outputs) - 1) + ["length"]
        was_running = n < MAX_NUM_SEQS
        assert [o.version for o in outputs] == ([before] * 5 if was_running else []) + [after] * (20 - 5 * was_running)
        ages = {o.kv_version for o in outputs if o.version == after}
        assert ages == {None} or (ages == {before} and was_running)
        num_kept += ages == {before}
    # vLLM has no place for the probe's two prompts beside a full batch: two begin anew.
    assert num_kept == MAX_NUM_SEQS - (2 if has_probe and not case.is_emulated else 0)
    assert run(engine, [a_request()])["a"].kv_version is None


def test_an_update_that_does_not_fit_is_refused_and_the_old_version_serves_on(case: Case, engine: Engine) -> None:
    before, version = run(engine, [a_request()])["a"], engine.version
    with pytest.raises(UpdateRefused, match="does not fit the engine") as refused:
        engine.load(case.unfit.stored())
    assert "weight" in str(refused.value)
    if not case.is_emulated:
        assert all(
            part in str(refused.value)
            for part in ("lm_head.weight is missing", "model.extra.weight is unknown", "model.norm.weight is ((32,)")
        )
    assert engine.version == version
    assert run(engine, [a_request()])["a"] == before


def test_the_probe_tells_the_trainers_weights_from_others(case: Case, engine: Engine) -> None:
    case.new_version()
    probe = case.probe()
    engine.load(case.rig.stored(), probe)
    assert not engine.has_unfinished()
    case.new_version()
    with pytest.raises(RuntimeError, match="is not the trainer's"):
        engine.load(case.rig.stored(), probe)


def test_tokens_are_counted(engine: Engine) -> None:
    before = engine.counts().num_tokens
    run(engine, [a_request("a"), a_request("b", max_tokens=5, logprobs=False)])
    counts = engine.counts()
    assert (counts.num_tokens - before, counts.running, counts.waiting) == (17, 0, 0)
