"""A headless Chromium that opens pages and obeys: a client of its debugging pipe (JSON messages, each ended by a zero
byte), which needs no port and no library."""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # it may be root's, and sees no page but ours
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-extensions",
    "--hide-scrollbars",
    "--mute-audio",
)
_ANSWER_S = 60.0


def program() -> str | None:
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


class Chromium:
    """One browser with one page. `requests`: what it asked for since it was opened; `errors`: what its console and its
    scripts complained of."""

    def __init__(self, path: str, width: int = 1280, height: int = 900) -> None:
        self._folder = tempfile.mkdtemp(prefix="pivot-chromium-")
        self._number, self._unread = 0, b""
        self.requests: list[str] = []
        self.errors: list[str] = []
        its_in, self._out = _pipe()
        self._in, its_out = _pipe()

        def connect() -> None:
            os.dup2(its_in, 3)
            os.dup2(its_out, 4)

        self._process = subprocess.Popen(
            [path, *_FLAGS, f"--user-data-dir={self._folder}", f"--window-size={width},{height}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(3, 4),
            preexec_fn=connect,
            start_new_session=True,
        )
        os.close(its_in)
        os.close(its_out)
        targets = self._call("Target.getTargets", session="")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self._call("Target.attachToTarget", session="", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")
        self.size(width, height)

    def __enter__(self) -> "Chromium":
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        shutil.rmtree(self._folder, ignore_errors=True)

    # --- what is asked of it

    def size(self, width: int, height: int) -> None:
        """Of the window, in pixels."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def open(self, path: Path) -> None:
        """Load the file, to the end."""
        self.requests, self.errors = [], []
        self._call("Page.navigate", url=path.absolute().as_uri())
        self.until("document.readyState === 'complete'")

    def evaluate(self, script: str) -> Any:
        """The value of an expression. Raises RuntimeError where it throws."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def until(self, script: str, limit_s: float = 30.0) -> Any:
        """Wait until the expression is true; its value."""
        deadline = time.monotonic() + limit_s
        while not (value := self.evaluate(script)):
            assert time.monotonic() < deadline, f"not so after {limit_s:g} s: {script}"
            time.sleep(0.02)
        return value

    def mouse(self, kind: str, x: float, y: float, *, times: int = 1, held: bool = False) -> None:
        """`kind`: mousePressed, mouseMoved or mouseReleased."""
        button = "left" if kind != "mouseMoved" or held else "none"
        self._call(
            "Input.dispatchMouseEvent",
            type=kind,
            x=x,
            y=y,
            button=button,
            buttons=int(kind == "mousePressed" or held),
            clickCount=times,
        )

    def click(self, x: float, y: float, times: int = 1) -> None:
        for number in range(1, times + 1):
            self.mouse("mousePressed", x, y, times=number)
            self.mouse("mouseReleased", x, y, times=number)

    def drag(self, x0: float, x1: float, y: float) -> None:
        self.mouse("mousePressed", x0, y)
        for part in (0.3, 0.6, 1.0):
            self.mouse("mouseMoved", x0 + part * (x1 - x0), y, held=True)
        self.mouse("mouseReleased", x1, y)

    def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        self._call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self._call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def screenshot(self, clip: dict[str, float] | None = None) -> bytes:
        """PNG of what is seen, or of a part of the page (x, y, width, height)."""
        more: dict[str, Any] = {"clip": {**clip, "scale": 1}, "captureBeyondViewport": True} if clip else {}
        return base64.b64decode(self._call("Page.captureScreenshot", format="png", **more)["data"])

    def as_pdf(self) -> bytes:
        return base64.b64decode(self._call("Page.printToPDF", printBackground=True)["data"])

    # --- the pipe

    def _call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session is None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._take(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._in], [], [], _ANSWER_S)
            data = os.read(self._in, 1 << 20) if ready else b""
            if not data:
                raise RuntimeError("Chromium does not answer" if not ready else "Chromium has ended")
            self._unread += data
        text, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def _take(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.errors.append(json.dumps(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.errors.append(params["entry"]["text"])


def _pipe() -> tuple[int, int]:
    """Reading and writing end, beyond the numbers that the browser wants."""
    ends = []
    for fd in os.pipe():
        ends.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10))
        os.close(fd)
    return ends[0], ends[1]
