"""What holds for every file of the repository."""

import ast
import re
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from pipeline.checks import check_all
from pipeline.config import load_files
from tests.architecture.sources import ROOT, own_files, relative

MOST_LINES = 400
_BAD_NAME = re.compile(r"(Manager|Helper|Handler|Util|Utils)$")
_BAD_MODULES = {"utils", "util", "helpers", "helper", "common", "misc"}
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def bad_names(path: str, source: str) -> list[str]:
    """Names that say nothing of what a thing is."""
    classes = [node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    found = [name for name in classes if _BAD_NAME.search(name)]
    return found + [part for part in Path(path).with_suffix("").parts if part in _BAD_MODULES]


def broken_links(path: Path) -> list[str]:
    """Relative links of a Markdown file whose file or heading does not exist."""
    broken = []
    for match in _LINK.finditer(_FENCE.sub("", path.read_text(encoding="utf-8"))):
        link = match[1] or match[2]
        if re.match(r"[a-z]+:", link):
            continue
        target, _, heading = link.partition("#")
        file = (path.parent / target) if target else path
        if not file.exists() or (heading and heading not in _anchors(file)):
            broken.append(link)
    return broken


def _anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ +(.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_sources_are_short() -> None:
    lengths = {relative(path): path.read_text(encoding="utf-8").count("\n") for path in own_files("*.py")}
    assert {path: length for path, length in lengths.items() if length > MOST_LINES} == {}


def test_names_say_what_a_thing_is() -> None:
    found = {relative(path): bad_names(relative(path), path.read_text(encoding="utf-8")) for path in own_files("*.py")}
    assert {path: names for path, names in found.items() if names} == {}


def test_links_lead_somewhere() -> None:
    found = {relative(path): broken_links(path) for path in own_files("*.md")}
    assert found and {path: links for path, links in found.items() if links} == {}


@pytest.mark.parametrize("path", [p for p in own_files("*.yaml") if "configs" in p.parts], ids=relative)
def test_each_config_is_valid_with_all_that_it_names(path: Path) -> None:
    """Those of sites, modes and examples go with any other."""
    base = "quickstart" if path.stem == "lora" else "emulated"  # adapters need a model
    whole = [ROOT / f"configs/{base}.yaml"] if path.parent.name in ("slurm", "placement", "examples") else []
    check_all(load_files([*whole, path]))


def test_no_file_knows_the_machine_it_was_written_on() -> None:
    machine = re.compile(rb"/%s/|/%s/" % (b"work", b"root"))
    assert [relative(path) for path in own_files("*") if machine.search(path.read_bytes())] == []


def test_the_rules_for_names_and_links_find_what_breaks_them(tmp_path: Path) -> None:
    assert bad_names("a/b.py", "class TaskManager: ...\nclass Managers: ...") == ["TaskManager"]
    assert bad_names("a/utils.py", "") == ["utils"]
    page = tmp_path / "page.md"
    page.write_text("# A heading: of it\n[a](#a-heading-of-it) [b](#other) [c](gone.md) ![d](x.png) [e](https://x.y)\n")
    assert broken_links(page) == ["#other", "gone.md", "x.png"]


# --- the environment ------------------------------------------------------------------------------------------------


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@pytest.mark.skipif(installed("vllm") is not None, reason="an environment for GPUs")
def test_torch_is_the_cpu_build() -> None:
    """An unmarked torch is a CUDA build of several GB."""
    assert str(installed("torch")).endswith("+cpu")


@pytest.mark.skipif(installed("vllm") is not None, reason="an environment for GPUs")
def test_the_tested_set_is_what_is_installed() -> None:
    different = {name: (pin, have) for name, pin in pins().items() if (have := installed(name)) not in (pin, None)}
    assert different == {}


def test_the_tested_set_fits_what_the_project_asks_for() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(r for e in ("cpu", "test") for r in project["optional-dependencies"][e])]
    for requirement in map(Requirement, asked):
        assert requirement.specifier.contains(pins()[requirement.name.lower()]), requirement
