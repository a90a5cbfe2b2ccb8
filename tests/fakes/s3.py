"""A local S3 server: a process of its own, which can be stopped, continued and killed."""

import os
import signal
import subprocess
import sys
import urllib.request
from contextlib import suppress

_SERVE = """
import logging, sys, time
from moto.server import ThreadedMotoServer
logging.disable()
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


class S3Server:
    """`environment` is what a client needs to find it. It starts empty, and ends with its maker."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._process.stdout is not None
        port = int(self._process.stdout.readline())
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    def stall(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def trust_nobody(self) -> None:
        """From now on all credentials are wrong."""
        self._allow("0")

    def trust_all(self) -> None:
        self._allow("inf")

    def _allow(self, num_calls: str) -> None:
        url = f"{self.environment['AWS_ENDPOINT_URL']}/moto-api/reset-auth"
        kind = {"Content-Type": "text/plain"}
        urllib.request.urlopen(urllib.request.Request(url, num_calls.encode(), kind, method="POST")).close()

    def close(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()
        self._process.communicate()
