"""A thread that looks at processes again and again, for as long as a test is inside it."""

import threading
from typing import Self


class Looker(threading.Thread):
    def __init__(self, period_s: float) -> None:
        super().__init__()
        self._period_s = period_s
        self._is_over = threading.Event()

    def look(self) -> None:
        raise NotImplementedError

    def run(self) -> None:
        while not self._is_over.wait(self._period_s):
            self.look()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self.join()
