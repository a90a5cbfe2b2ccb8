"""vLLM's own server with the quickstart's judge, as a judge behind a URL: killed and started again in the middle."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from stages.genrm.prompt import JudgePrompt
from stages.reward import reward
from stages.text import load_tokenizer
from tests.fakes.scripted import FakeTask, FakeWorker, Running, make_config
from tests.fakes.vllm_server import VllmServer
from tests.stages.scoring.test_sources import data, scored
from tests.stages.test_reward import generated

__all__ = ["data"]
pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(400)]

JUDGE = Path(__file__).parents[3] / "configs" / "quickstart" / "genrm"
NUMBERS = [f"{7 * n % 9}{5 * n % 8}{3 * n % 7}{n % 10}" for n in range(48)]
"""Each with its digits in order is right, as it is it is wrong, unless it is in order."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    made = VllmServer(JUDGE, tmp_path_factory.mktemp("cache"))
    made.start()
    yield made
    made.close()


def genrm(server: VllmServer, **endpoint: Any) -> dict[str, Any]:
    return {
        "template": "{{ response }}",
        "max_tokens": 40,
        "temperature": 0.0,
        "retries": 0,
        "verdict": {"kind": "choice", "marker": "Verdict:", "choices": {"right": 1.0, "wrong": 0.0}},
        "endpoint": {"url": server.url, "model": "genrm", "concurrency": 4, "patience_s": 200.0} | endpoint,
    }


def asked(number: str, *, is_right: bool) -> str:
    return f"{number} Answer: {''.join(sorted(number)) if is_right else number}$"


def test_r29_nothing_is_lost_when_vllms_server_is_killed_and_comes_again(
    queue_client: Any, step: int, data: dict[str, Any], server: VllmServer
) -> None:
    responses = [asked(number, is_right=n % 2 == 0) for n, number in enumerate(NUMBERS)]
    ids = generated(queue_client, step, responses)
    tree = make_config(data=data).model_dump(mode="json") | {"reward": {"genrm": genrm(server)}}
    task = FakeTask(FakeWorker(config=type(make_config()).model_validate(tree), queue=queue_client), step=1)
    task.spec = type(task.spec)(task="t", stage="reward", step=step, version=0, attempt=1)
    running = Running(reward, task)
    task.dispatch(ids, turn=2)
    task.end()
    task.wait_for(lambda: len(task.verdicts) >= 4)
    server.kill()
    assert 4 <= len(task.verdicts) < len(ids)
    server.start()
    metrics = running.result()["metrics"]
    assert sorted(verdict.id for verdict in task.verdicts) == ids
    assert Counter(row.state for row in queue_client.get(ids)) == {"scored": len(ids)}
    told = {verdict.id: (verdict.failure, verdict.score) for verdict in task.verdicts}
    expected = [n % 2 == 0 or list(number) == sorted(number) for n, number in enumerate(NUMBERS)]
    agreed = sum(told[id] == ("", float(is_right)) for id, is_right in zip(ids, expected, strict=True))
    assert metrics["genrm/num_failed"] == 0 and agreed >= 44, told  # a judge of 114,000 parameters errs at times


def test_r35_the_server_reads_the_judges_prompt_as_an_engine_of_the_run_does(server: VllmServer) -> None:
    judge, response = JudgePrompt("{{ prompt }} Answer: {{ response }}$", load_tokenizer(str(JUDGE))), "3479"
    body = {"model": "genrm", "messages": [{"role": "user", "content": judge.text("4793", response)}], "max_tokens": 1}
    told = httpx.post(f"{server.url}/chat/completions", json=body | {"return_token_ids": True}, timeout=60).json()
    assert told["prompt_token_ids"] == judge.ids("4793", response) and told["prompt_token_ids"].count(1) == 1


def test_r29_failures_of_vllms_server_are_typed(
    queue_client: Any, step: int, data: dict[str, Any], server: VllmServer
) -> None:
    """Too long for its context; a verdict that is cut off; a server that is gone."""
    long = {"genrm": genrm(server)}
    found, _, task = scored(queue_client, step, ["7" * 300 + " Answer: 7$", asked("4731", is_right=True)], data, long)
    assert list(found.values()) == ["refused", 1.0], task.lines
    cut = {"genrm": genrm(server) | {"max_tokens": 2}}
    assert (
        scored(queue_client, step + 100_000, [asked("4731", is_right=True)], data, cut)[0].popitem()[1] == "truncated"
    )
    server.kill()
    gone = {"genrm": genrm(server, patience_s=0.5)}
    assert scored(queue_client, step + 200_000, ["1 Answer: 1$"], data, gone)[0].popitem()[1] == "unreachable"
    server.start()
