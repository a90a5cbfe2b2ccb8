import subprocess
from collections.abc import Iterator

import pytest

from tests.fakes.apt import install, may_install
from tests.fakes.chromium import Chromium, program

PACKAGE = "chromium"


def require() -> str:
    """Path of a Chromium. Skips the test, with one loud line, where there is none and none may be installed."""
    failed = ""
    if program() is None and may_install():
        try:
            install("Chromium", PACKAGE)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            failed = f" ({error})"
    found = program()
    if found is None:
        pytest.skip(
            f"NO CHROMIUM HERE, NO PAGE IS LOOKED AT{failed}. `apt-get install {PACKAGE}`, or PIVOT_TEST_INSTALL=1 to "
            "have the tests do that."
        )
    return found


@pytest.fixture(scope="session")
def browser() -> Iterator[Chromium]:
    with Chromium(require()) as found:
        yield found
