"""A judge behind a URL: any server that speaks OpenAI's chat completions, one of one's own or one that is paid for."""

import asyncio
import os
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pipeline.config_reward import GENRM, GenRM
from stages.genrm import verdict as verdicts
from stages.genrm.prompt import JudgePrompt
from stages.genrm.verdict import Failure, FailureType, Score
from stages.scoring.asking import Asking
from stages.scoring.base import Answer, Give, Question

if TYPE_CHECKING:
    import httpx

_FIRST_WAIT_S, _MOST_WAIT_S = 0.2, 5.0
_BUSY = (408, 409, 425, 429)
"""Answers that another try may do better than; so may 500 and above."""


@lru_cache(maxsize=4)
def _client_of(key: str, concurrency: int) -> "httpx.AsyncClient":
    """Kept by the process from step to step, with its connections. Of the loop of the user's code."""
    import httpx

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.AsyncClient(headers=headers, limits=httpx.Limits(max_connections=concurrency))


class EndpointJudge(Asking):
    """A Source. Time limits count from when a request is sent: of a server that is down, busy or broken, from the next
    try, until `endpoint.patience_s` is over."""

    name = GENRM
    version = 0

    def __init__(self, genrm: GenRM, give: Give) -> None:
        assert genrm.endpoint is not None
        super().__init__(give)
        self._genrm, self._endpoint = genrm, genrm.endpoint
        self._prompt = JudgePrompt(genrm.template)
        self.retries = genrm.retries
        self.needs_example = self._prompt.needs_messages
        key = os.environ.get(self._endpoint.key_variable, "") if self._endpoint.key_variable else ""
        self._key = key
        self._places = asyncio.Semaphore(self._endpoint.concurrency)

    async def answer(self, question: Question) -> Answer:
        async with self._places:
            return await self._try(question)

    async def _try(self, question: Question) -> Answer:
        import httpx

        client = _client_of(self._key, self._endpoint.concurrency)
        body, wait_s = self._body(question), _FIRST_WAIT_S
        patient_until = time.monotonic() + self._endpoint.patience_s
        while True:
            failure, said = FailureType.UNREACHABLE, ""
            try:
                async with asyncio.timeout(self._genrm.timeout_s):
                    url = f"{self._endpoint.url}/chat/completions"
                    reply = await client.post(url, json=body, timeout=None)
                if reply.status_code == 200:
                    return self._read(question, reply)
                said = f"{reply.status_code} {reply.text[:300]!r}"
                if reply.status_code < 500 and reply.status_code not in _BUSY:
                    return self._fail(question, FailureType.REFUSED, said)
            except TimeoutError:
                return self._fail(question, FailureType.TIMEOUT, "")
            except httpx.HTTPError as error:
                said = f"{type(error).__name__}: {error}"
            if time.monotonic() + wait_s > patient_until:
                return self._fail(question, failure, said)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _MOST_WAIT_S)

    def _fail(self, question: Question, failure: FailureType, said: str) -> Answer:
        if said:
            print(f"{self._endpoint.url}: {said}")
        return Answer(id=question.id, outcome=Failure(failure))

    def _body(self, question: Question) -> dict[str, Any]:
        messages = question.example.messages if question.example is not None else ()
        text = self._prompt.text(question.row.text, question.response, messages, question.other)
        return {
            "model": self._endpoint.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": self._genrm.max_tokens,
            "temperature": self._genrm.temperature,
            "seed": question.seed,
            **({"logprobs": True} if self._genrm.mode == "soft" else {}),
        }

    def _read(self, question: Question, reply: "httpx.Response") -> Answer:
        try:
            told = reply.json()
            choice = told["choices"][0]
            message = choice["message"]
            text = message.get("content") or ""
            reasoning = message.get("reasoning_content") or message.get("reasoning")  # servers call it either
            finish = "stop" if choice["finish_reason"] == "stop" else "length"
            num_tokens = int((told.get("usage") or {}).get("completion_tokens") or 0)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            return self._fail(question, FailureType.UNPARSED, f"no chat completion: {type(error).__name__} {error}")
        if reasoning and self._genrm.verdict.reasoning_end:  # the server has taken the tag away
            text = self._genrm.verdict.reasoning_end + text
        outcome = self._outcome(text, finish, choice)
        return Answer(id=question.id, outcome=outcome, text=f"{reasoning or ''}{text}", num_tokens=num_tokens)

    def _outcome(self, text: str, finish: str, choice: Mapping[str, Any]) -> Score | Failure:
        if self._genrm.mode != "soft":
            return verdicts.parse(text, finish, self._genrm.verdict)
        found = verdicts.find(text, finish, self._genrm.verdict)
        if isinstance(found, Failure):
            return found
        pieces, end = [], len(text)
        for token in reversed((choice.get("logprobs") or {}).get("content") or []):
            begin = max(0, end - len(token["token"]))
            pieces.append((begin, end, float(token["logprob"])))
            end = begin
        return verdicts.soften(found, pieces, self._genrm.verdict)
