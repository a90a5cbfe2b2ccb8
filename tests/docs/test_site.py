"""The site: it is built without a warning, loads nothing from elsewhere, and knows each key and each option."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli.commands import commands
from pipeline.config import Config
from tests.architecture.sources import ROOT

pytest.importorskip("mkdocs", reason="the site is of the extra dev: `make check` builds it")

_LOADING = {"script": "src", "img": "src", "source": "srcset", "iframe": "src", "link": "href"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Loaded(HTMLParser):
    """What a page makes a browser fetch, and the addresses of its links."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        address = found.get(_LOADING.get(tag, ""))
        if address and found.get("rel") not in ("canonical", "prev", "next"):
            self.fetched.append(address)
        if tag == "a" and (link := found.get("href")):
            self.links.append(link)


def test_nothing_is_loaded_from_elsewhere_and_all_that_is_loaded_is_there(site: Path) -> None:
    pages = [page for page in site.rglob("*.html") if page.name != "404.html"]
    assert len(pages) > 50
    for page in pages:
        for address in Loaded(page).fetched:
            assert not re.match(r"(https?:)?//", address), f"{page.name} loads {address}"
            file = address.partition("?")[0].partition("#")[0]
            assert not file or (page.parent / file).is_file(), f"{page.name} loads {address}, which is not there"


def test_links_within_the_site_lead_somewhere(site: Path) -> None:
    for page in (page for page in site.rglob("*.html") if page.name != "404.html"):
        for link in Loaded(page).links:
            file = link.partition("#")[0]
            if file and not re.match(r"[a-z]+:", file):
                assert (page.parent / file).exists(), f"{page.relative_to(site)} links to {link}"


def keys(schema: dict[str, Any], node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Keys of the configuration that have a value, as its JSON schema has them."""
    options = [node, *node.get("anyOf", [])]
    refs = [option["$ref"].rpartition("/")[2] for option in options if "$ref" in option]
    items = node.get("items") or node.get("additionalProperties")
    if refs:
        for name, inner in schema["$defs"][refs[0]].get("properties", {}).items():
            yield from keys(schema, inner, f"{path}.{name}".lstrip("."))
    elif isinstance(items, dict) and "$ref" in items:
        yield from keys(schema, items, path + ("[]" if node["type"] == "array" else ".<name>"))
    else:
        yield path, node


def test_each_key_stands_in_the_reference_and_says_what_it_means(site: Path) -> None:
    schema = Config.model_json_schema()
    found = {path: node for name, top in schema["properties"].items() for path, node in keys(schema, top, name)}
    assert len(found) > 100 and "reward.functions.<name>.path" in found and "stages[].name" in found
    assert [path for path, node in found.items() if not node.get("description")] == []
    page = (site / "reference" / "configuration.html").read_text(encoding="utf-8")
    written = {path.replace("<", "&lt;").replace(">", "&gt;") for path in found}
    assert {path for path in written if f"<code>{path}</code>" not in page} == set()


def test_each_command_and_option_stands_in_the_reference(site: Path) -> None:
    page = (site / "reference" / "commands.html").read_text(encoding="utf-8")
    for name, command in commands.commands.items():
        assert (f'id="{name}"' in page) is not command.hidden
        if not command.hidden:
            for option in (opt for param in command.params if param.param_type_name == "option" for opt in param.opts):
                assert option in page, f"{name} {option}"
