"""README's table of measured figures says only what docs/benchmarks.md holds."""

import re

from tests.architecture.sources import ROOT

README, BENCHMARKS = (ROOT / name for name in ("README.md", "docs/benchmarks.md"))
_NUMBER = re.compile(r"(?<![\w.])-?(?:\d[\d,]*\d|\d)?(?:\.\d+)?(?:e-?\d+)?(?![\w])")


def numbers(text: str) -> list[str]:
    return [found for found in _NUMBER.findall(text) if re.search(r"\d", found)]


def section_of(script: str, text: str) -> str:
    """The part of the page whose heading names the script; "" if there is none."""
    for part in re.split(r"^## ", text, flags=re.MULTILINE):
        if f"`{script}" in part.partition("\n")[0]:
            return part
    return ""


def unheld(readme: str, benchmarks: str) -> list[str]:
    """Figures of the table that do not stand in the section of the script that they name."""
    rows = re.findall(r"^\| (.+?) \| (.+?) \| `(\w+\.py)` \|$", readme, re.MULTILINE)
    found = []
    for what, figure, script in rows:
        held = numbers(section_of(script, benchmarks))
        found += [f"{what}: {number} is not in {script}'s" for number in numbers(figure) if number not in held]
    return found if rows else ["no rows"]


def test_each_figure_of_the_readme_is_one_of_the_benchmarks() -> None:
    readme, benchmarks = README.read_text(encoding="utf-8"), BENCHMARKS.read_text(encoding="utf-8")
    measured = readme.partition("## Measured\n")[2].partition("\n## ")[0]
    assert measured.count(".py` |") == measured.count("\n|") - 2, "a row names its script"
    assert unheld(measured, benchmarks) == []
    machine = measured.strip().partition(", with")[0].removeprefix("On ")
    assert machine.startswith("x86_64") and machine in benchmarks
    for date in re.findall(r"\d{4}-\d\d-\d\d", measured):
        assert date in benchmarks


def test_a_figure_that_was_not_measured_is_found() -> None:
    page = "## A (`a.py`, load 5)\n\n| x | 48.8, 1.1e-5, 0 of 6 |\n## B (`b.py`)\n7.5\n"
    good = "| x | 48.8 points | `a.py` |\n| y | 1.1e-5; 0 | `a.py` |\n"
    assert unheld(good, page) == []
    assert unheld("| x | 48.9 | `a.py` |\n", page) and unheld("| x | 7.5 | `a.py` |\n", page)
    assert unheld("| x | 8.8 | `a.py` |\n", page) and unheld("| x | 1 | `gone.py` |\n", page)


def test_the_readme_begins_with_a_sentence_a_picture_and_two_commands() -> None:
    readme = README.read_text(encoding="utf-8")
    top = readme.partition("\n## GPUs")[0]
    assert top.count("<picture>") == 1 and "make demo" in top and "make test" in top
    for picture in re.findall(r'(?:src|srcset)="([^"]+)"|!\[[^\]]*\]\(([^)]+)\)', readme):
        assert (ROOT / "".join(picture)).is_file(), picture
