"""A server that speaks OpenAI's chat completions, in a process of its own: FastAPI, as vLLM's is.

    python -m tests.fakes.openai_server PORT

What it says depends on the prompt alone. `faults` of a request's prompt: `<slow>` takes long, `<empty>` says nothing,
`<503 N>` is answered so N times, `<400>` always, `<garbage>` is no JSON, `<reasoning>` gives its verdict there only,
`<thought>` gives another one there first, under the name that vLLM has for it.
"""

import asyncio
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from typing import Any

KEY = "sk-secret"
_busy: Counter[str] = Counter()


def verdict_of(text: str) -> str:
    return "yes" if "good" in text else "no"


def make_app() -> Any:
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse, Response

    app = FastAPI()

    @app.get("/health")
    async def health() -> dict[str, int]:
        return {"pid": os.getpid()}

    @app.post("/v1/chat/completions")
    async def complete(request: Request) -> Response:
        if request.headers.get("authorization") not in (None, f"Bearer {KEY}"):
            return JSONResponse({"error": "wrong key"}, 401)
        body = await request.json()
        text = body["messages"][0]["content"]
        if "<slow>" in text:
            await asyncio.sleep(30)
        if (busy := re.search(r"<503 (\d)>", text)) and _busy[text] < int(busy[1]):
            _busy[text] += 1
            return JSONResponse({"error": "busy"}, 503)
        if "<400>" in text:
            return JSONResponse({"error": "too long"}, 400)
        if "<garbage>" in text:
            return Response("<html>no</html>", media_type="text/html")
        said = verdict_of(text)
        pieces = [] if "<empty>" in text else ["I think. ", "Ver", "dict:", f" {said}"]
        message: dict[str, Any] = {"role": "assistant", "content": "".join(pieces)}
        if "<reasoning>" in text:
            message = {"role": "assistant", "content": "hm", "reasoning_content": "Verdict: yes"}
        if "<thought>" in text:
            message["reasoning"] = "Verdict: no"
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        if body.get("logprobs"):
            choice["logprobs"] = {"content": [{"token": p, "logprob": math.log(0.8)} for p in pieces]}
        return JSONResponse({"choices": [choice], "usage": {"completion_tokens": len(pieces)}})

    return app


class Server:
    """`port` stays what it is over its lives."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-m", "tests.fakes.openai_server", str(self.port)])
        deadline = time.monotonic() + 30
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1).close()
                return
            except OSError:
                assert time.monotonic() < deadline and self._process.poll() is None
                time.sleep(0.05)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


if __name__ == "__main__":
    import uvicorn

    uvicorn.run(make_app(), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", access_log=False)
