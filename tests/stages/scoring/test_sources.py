"""Reward without slots: functions and a judge behind a URL, on the real queue; R29 and R30 for both."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stages.reward import reward
from tests.fakes.openai_server import KEY, Server
from tests.fakes.scripted import FakeTask, FakeWorker, Running, ScriptedEngine, hosted, make_config
from tests.stages.test_reward import generated, judging, prompt_text, says

FILE = Path(__file__).parents[1] / "own" / "functions.py"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.kill()


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Any]:
    """The rows of the prompts that `generated` makes, unshuffled."""
    file = tmp_path / "train.jsonl"
    file.write_text(
        "".join(f'{{"prompt": "question {i}", "reward_model": {{"ground_truth": "good"}}}}\n' for i in range(16))
    )
    return {"train_files": [str(file)], "train_batch_size": 16, "shuffle": False}


def scored(
    queue: Any, step: int, responses: list[str], data: dict[str, Any], reward_section: dict[str, Any], **sections: Any
) -> tuple[dict[str, float | str], dict[str, float], FakeTask]:
    """(score or failure by response, metrics, task), without any engine."""
    ids = generated(queue, step, responses)
    config = make_config(data=data, **sections)
    tree = config.model_dump(mode="json")
    tree["reward"] = reward_section
    config = type(config).model_validate(tree)
    task = FakeTask(FakeWorker(config=config, queue=queue, name="n0-reward-0"), step=1)
    task.spec = type(task.spec)(task="t", stage="reward", step=step, version=0, attempt=1)
    running = Running(reward, task)
    task.dispatch(ids, turn=2)
    task.end()
    result = running.result()
    by_id = {v.id: v.failure or v.score for v in task.verdicts}
    assert sorted(by_id) == ids
    rows = {row.id: row for row in queue.get(ids)}
    assert all(rows[id].state == "scored" for id in ids)
    return {response: by_id[id] for id, response in zip(ids, responses, strict=True)}, result["metrics"], task


def endpoint(server: Server, **changes: Any) -> dict[str, Any]:
    where = {"url": server.url, "model": "m", "concurrency": 4, "patience_s": 5.0} | changes.pop("endpoint", {})
    return {"template": "{{ prompt }}|{{ response }}", "retries": 0, "endpoint": where} | changes


# ------------------------------------------------------------------------------------------------ functions
def test_a_function_alone_gives_the_score(queue_client: Any, step: int, data: dict[str, Any]) -> None:
    functions = {"exact": {"path": f"{FILE}:exact", "memory_bytes": 1 << 28}}
    found, metrics, _ = scored(queue_client, step, ["good", "bad"], data, {"functions": functions})
    assert found == {"good": 1.0, "bad": 0.0}
    assert metrics["reward/num_scored_exact"] == 2 and metrics["reward/sum_exact"] == 1.0


def test_r29_failures_of_functions_are_typed_and_never_a_score(
    queue_client: Any, step: int, data: dict[str, Any]
) -> None:
    odd = {"path": f"{FILE}:odd", "memory_bytes": 1 << 28, "timeout_s": 3.0}
    responses = ["fine", "raises", "hangs", "eats", "dies", "nan"]
    found, metrics, task = scored(queue_client, step, responses, data, {"functions": {"odd": odd}})
    assert found == {
        "fine": 1.0,
        "raises": "odd:error",
        "hangs": "odd:timeout",
        "eats": "odd:memory",
        "dies": "odd:crashed",
        "nan": "odd:unparsed",
    }
    assert metrics["genrm/num_failed"] == 5 and metrics["genrm/failed_odd_timeout"] == 1
    assert any("a bug of the user's" in line for line in task.lines)


def test_a_mixture_adds_up_and_fails_with_its_parts(queue_client: Any, step: int, data: dict[str, Any]) -> None:
    """The judge on an engine, beside functions."""
    ids = generated(queue_client, step, ["good", "raises", "bad"])
    functions = {
        "exact": {"path": f"{FILE}:exact", "memory_bytes": 1 << 28},
        "odd": {"path": f"{FILE}:odd", "memory_bytes": 1 << 28},
    }

    def script(request: Any) -> Any:
        return says("Verdict: no" if "good" in prompt_text(request) else "Verdict: yes")

    weighted = {"functions": functions, "weights": {"genrm": 0.25, "exact": 2.0}}
    with hosted(ScriptedEngine(script)) as host:
        worker = FakeWorker(config=make_config(data=data, reward=weighted), queue=queue_client, engine=host)
        task = FakeTask(worker, step=1)
        running = Running(reward, task)
        task.dispatch(ids, turn=2)
        task.end()
        running.result()
    assert {v.id: v.failure or v.score for v in task.verdicts} == {ids[0]: 3.0, ids[1]: "odd:error", ids[2]: 1.25}


# ------------------------------------------------------------------------------------------------ a judge behind a URL
def test_a_judge_behind_a_url(
    queue_client: Any, step: int, data: dict[str, Any], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    genrm = endpoint(server, endpoint={"key_variable": "MY_KEY"})
    found, metrics, _ = scored(queue_client, step, ["good", "poor"], data, {"genrm": genrm})
    assert found == {"good": 1.0, "poor": 0.0} and metrics["genrm/num_tokens"] == 8


def test_r29_r30_failures_of_a_server_are_typed(
    queue_client: Any, step: int, data: dict[str, Any], server: Server
) -> None:
    responses = ["good", "good <slow>", "<empty>", "good <503 2>", "<400>", "<garbage>", "<reasoning>"]
    found, _, task = scored(queue_client, step, responses, data, {"genrm": endpoint(server, timeout_s=3.0)})
    assert list(found.values()) == [1.0, "timeout", "empty", 1.0, "refused", "unparsed", "unparsed"], task.lines


@pytest.mark.parametrize("is_said", [True, False])
def test_r30_reasoning_that_a_server_gives_apart_is_reasoning(
    queue_client: Any, step: int, data: dict[str, Any], server: Server, is_said: bool
) -> None:
    """A judge that must end its reasoning has done so where the server tells of it apart, and else not."""
    genrm = endpoint(server, verdict={"reasoning_end": "</think>"})
    found, _, _ = scored(queue_client, step, ["good <thought>" if is_said else "good"], data, {"genrm": genrm})
    assert list(found.values()) == [1.0 if is_said else "truncated"]


def test_a_wrong_key_and_a_server_that_never_comes_are_said(
    queue_client: Any, step: int, data: dict[str, Any], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "wrong")
    genrm = endpoint(server, endpoint={"key_variable": "MY_KEY"})
    assert scored(queue_client, step, ["good"], data, {"genrm": genrm})[0] == {"good": "refused"}
    genrm = endpoint(server, endpoint={"url": "http://127.0.0.1:9/v1", "patience_s": 0.5})
    assert scored(queue_client, step + 100_000, ["good"], data, {"genrm": genrm})[0] == {"good": "unreachable"}


def test_soft_scores_are_means_by_probability(
    queue_client: Any, step: int, data: dict[str, Any], server: Server
) -> None:
    found, _, _ = scored(queue_client, step, ["good", "poor"], data, {"genrm": endpoint(server, mode="soft")})
    assert found == {"good": pytest.approx(0.8), "poor": pytest.approx(0.2)}


def test_nothing_is_lost_when_the_server_is_killed_and_comes_again(
    queue_client: Any, step: int, data: dict[str, Any]
) -> None:
    server = Server()
    again = threading.Thread(target=lambda: (server.kill(), time.sleep(1.0), server.start()))
    genrm = endpoint(server, endpoint={"patience_s": 30.0, "concurrency": 2})
    again.start()
    found, metrics, _ = scored(queue_client, step, [f"good {i}" for i in range(16)], data, {"genrm": genrm})
    again.join()
    server.kill()
    assert set(found.values()) == {1.0} and len(found) == 16 and metrics["genrm/num_failed"] == 0


# ------------------------------------------------------------------------------------------------ modes, on an engine
def test_soft_on_an_engine_reads_the_verdicts_own_tokens(queue_client: Any, step: int) -> None:
    """The scripted engine gives its k-th token the logprob -.5 - k; a letter is a token."""
    ids = generated(queue_client, step, ["good", "poor"])
    with judging(
        queue_client,
        step,
        lambda r: says("Verdict: " + ("yes" if "good" in prompt_text(r) else "no")),
        {"mode": "soft"},
    ) as (task, engine, running):
        task.dispatch(ids, turn=2)
        task.end()
        running.result()
    assert all(request.logprobs for request in engine.requests)
    p_yes, p_no = (pow(2.718281828459045, -sum(0.5 + at for at in range(9, 9 + n))) for n in (3, 2))
    found = {v.id: v.score for v in task.verdicts}
    assert found == {ids[0]: pytest.approx(p_yes), ids[1]: pytest.approx(1 - p_no)}


def test_pairwise_compares_each_response_with_the_others_to_its_prompt(queue_client: Any, step: int) -> None:
    from pipeline.queue.schema import PromptRow, SegmentRow, sequence_id
    from pipeline.samples import chosen_prompt
    from tests.stages.test_reward import BYTES, EOS

    texts = ["3", "1", "2"]
    prompt_no = chosen_prompt(step, 2)
    ids = [sequence_id(step, prompt_no, m) for m in range(3)]
    common: dict[str, Any] = {"step": step, "prompt_no": prompt_no, "text": "q", "data_source": "", "ground_truth": ""}
    queue_client.admit([PromptRow(id=id, member=m, prompt_ids=[1], **common) for m, id in enumerate(ids)])
    queue_client.claim(ids, [1] * 3)
    queue_client.put_segments(
        [
            SegmentRow(id=id, idx=0, turn=1, tokens=[*BYTES.encode(text), EOS], logprobs=[-0.1, -0.1], version=0,
                       replica="r", finish="stop")
            for id, text in zip(ids, texts, strict=True)
        ]
    )  # fmt: skip

    def script(request: Any) -> Any:
        one, other = prompt_text(request).split("[")[1].split("]")[0].split("/")
        return says(f"Verdict: {'first' if one > other else 'second'}")

    genrm = {
        "mode": "pairwise",
        "template": "[{{ response }}/{{ other }}]",
        "verdict": {"choices": {"first": 1.0, "second": 0.0}},
    }
    with judging(
        queue_client, step, script, genrm, rollout={"n": 3}, placement={"admission": "barrier"}
    ) as (task, engine, running):  # fmt: skip
        task.dispatch(ids[:1], turn=2)
        task.wait_for(lambda: len(task.verdicts) == 1)
        task.dispatch(ids[1:], turn=2)
        task.end()
        result = running.result()
    assert len(engine.requests) == 6 and len({r.id for r in engine.requests}) == 6
    assert {v.id: v.score for v in task.verdicts} == {ids[0]: 1.0, ids[1]: 0.0, ids[2]: 0.5}
    assert {s["response"] for s in result["samples"]} == {"1", "2", "3"}
