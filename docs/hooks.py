"""What the site has beside the pages in docs/, made when it is built so that it cannot grow old:

* the reference of the configuration, from the models that read it, and that of the commands, from the command line;
* README.md (the first page), CHANGELOG.md and CONTRIBUTING.md;
* a page for each file or folder of the repository that a page links to, so that the site needs nothing but itself.

mkdocs calls the functions `on_...`.
"""

import os
import re
from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from pathlib import Path, PurePosixPath

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from pipeline.cli.commands import commands
from pipeline.config import Config
from pipeline.config_errors import describe, item_of, submodel

ROOT = Path(__file__).parents[1]
FROM_ROOT = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
"""Pages of the repository's top folder, and where they are on the site."""
_AT_ROOT = {uri: name for name, uri in FROM_ROOT.items()}
_LINK = re.compile(r'(\]\(|\b(?:src|srcset|href)=")([^)"\s#]+)((?:#[^)"\s]*)?[)"])')
_FENCE = re.compile(r"^(```+).*?^\1`*$", re.MULTILINE | re.DOTALL)
_WIDE = "---\nhide: [navigation]\n---\n"
"""Pages with tables of long names."""
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "sh", ".md": "markdown", ".jinja": "jinja", ".toml": "toml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made."""
    for name, uri in FROM_ROOT.items():
        files.append(File.generated(config, uri, content=(ROOT / name).read_text(encoding="utf-8")))
    files.append(File.generated(config, "reference/configuration.md", content=configuration()))
    files.append(File.generated(config, "reference/commands.md", content=command_line()))
    for path in sorted(_linked(files)):
        files.append(File.generated(config, _uri(path), content=_source(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return _outside_fences(markdown, lambda text: _LINK.sub(lambda link: _rebased(link, page.file.src_uri), text))


# --- links ----------------------------------------------------------------------------------------------------------


def _linked(files: Files) -> set[str]:
    """What pages link to outside docs/, and what lies in such folders: paths from the repository's top."""
    found: set[str] = set()
    for page in files.documentation_pages():
        text = _FENCE.sub("", page.content_string)
        found |= {
            path for link in _LINK.finditer(text) if (path := _target(link[2], page.src_uri)) and _is_source(path)
        }
    return found | {f"{path}/{name}" for path in found if (ROOT / path).is_dir() for name in _names(path)}


def _is_source(path: str) -> bool:
    return bool(path) and path not in FROM_ROOT and not path.startswith("docs/") and (ROOT / path).exists()


def _names(folder: str) -> list[str]:
    return sorted(path.name for path in (ROOT / folder).iterdir() if path.is_file() and _is_text(path))


def _is_text(path: Path) -> bool:
    return b"\0" not in path.read_bytes()[:1024]


def _target(link: str, src_uri: str) -> str:
    """The path from the repository's top that a link of a page means; "" if it leads elsewhere."""
    if re.match(r"[a-z]+:|/", link):
        return ""
    origin = PurePosixPath(_AT_ROOT.get(src_uri, f"docs/{src_uri}"))
    return os.path.normpath(origin.parent / link)


def _uri(path: str) -> str:
    """Where on the site a path of the repository is."""
    return FROM_ROOT.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}.md")


def _rebased(link: re.Match[str], src_uri: str) -> str:
    path = _target(link[2], src_uri)
    is_made = src_uri.startswith(("source/", "reference/"))
    if not path or is_made or not (ROOT / path).exists():
        return link[0]  # elsewhere, made for the site as it is, or made like this one
    return f"{link[1]}{os.path.relpath(_uri(path), PurePosixPath(src_uri).parent)}{link[3]}"


def _outside_fences(text: str, change: Callable[[str], str]) -> str:
    """The text with `change` done to all but code."""
    ends = [0, *chain.from_iterable(fence.span() for fence in _FENCE.finditer(text)), len(text)]
    pieces = [text[start:end] for start, end in pairwise(ends)]
    return "".join(change(piece) if number % 2 == 0 else piece for number, piece in enumerate(pieces))


def _source(path: str) -> str:
    """A page that shows a file, or lists a folder."""
    head = f"---\nsearch: {{exclude: true}}\n---\n# `{path}`\n\n"
    if (ROOT / path).is_dir():
        name = PurePosixPath(path).name
        return head + "\n".join(f"* [{each}]({name}/{each}.md)" for each in _names(path))
    text = (ROOT / path).read_text(encoding="utf-8")
    return f"{head}``````{_LANGUAGES.get(PurePosixPath(path).suffix, 'text')}\n{text}\n``````\n"


# --- the configuration ----------------------------------------------------------------------------------------------


def configuration() -> str:
    """Every key of a configuration: its type and bounds, its default, its meaning."""
    head = (
        f"{_WIDE}# Configuration\n\nEvery key, from the models in "
        "[`pipeline/config.py`](../source/pipeline/config.py.md) that read it. `KEY.PATH=VALUE` on a command line sets "
        "one; `...[]` stands for each item of a list, `<name>` for a name of yours. `pivot-pipeline validate` checks "
        "all of them, and what they name.\n"
    )
    parts = [_section_page(name, field) for name, field in Config.model_fields.items()]
    return "\n".join([head, *parts])


def _section_page(name: str, field: FieldInfo) -> str:
    section = submodel(field.annotation) or item_of(field)
    assert section is not None, f"{name} is no section"
    doc = f"\n{' '.join(section.__doc__.split())}\n" if section.__doc__ else ""
    rows = [_row(path, each) for path, each in leaves(section, name if submodel(field.annotation) else f"{name}[]")]
    return "\n".join([f"## {name}", doc, "| key | takes | default | |", "|---|---|---|---|", *rows, ""])


def leaves(model: type[BaseModel], above: str) -> Iterator[tuple[str, FieldInfo]]:
    """Each key below a section with its path; of a section that may be left out, or comes many times, also its own."""
    for name, field in model.model_fields.items():
        path = f"{above}.{name}"
        inner, each = submodel(field.annotation), item_of(field)
        if inner is None or field.default is None:
            yield path, field
        if inner is not None:
            yield from leaves(inner, path)
        elif each is not None:
            yield from leaves(each, f"{path}{'[]' if isinstance(field.default, list) else '.<name>'}")


def _row(path: str, field: FieldInfo) -> str:
    has_items = submodel(field.annotation) or item_of(field)
    takes = "a section" if has_items else describe(field.annotation, field.metadata)
    cells = [f"`{path}`", _cell(takes), _default(field), _cell(field.description or "")]
    return f"| {' | '.join(cells)} |"


def _default(field: FieldInfo) -> str:
    value = field.default
    if value is PydanticUndefined:
        return "**required**"
    if value is None or value in ("", [], {}):
        return "none"
    if isinstance(value, tuple):
        value = list(value)
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _cell(text: str) -> str:
    """In a table; what stands between backticks is code as it is."""
    parts = " ".join(text.split()).split("`")
    parts[::2] = [part.replace("|", "\\|").replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts)


# --- the command line -----------------------------------------------------------------------------------------------


def command_line() -> str:
    """Every command with its arguments and options."""
    context = click.Context(commands, info_name="pivot-pipeline")
    head = f"{_WIDE}# Commands\n\n{_paragraphs(commands.help)}\n"
    shown = [command for command in commands.commands.values() if not command.hidden]
    return "\n".join([head, *(_command_page(command, context) for command in shown)])


def _command_page(command: click.Command, above: click.Context) -> str:
    context = click.Context(command, info_name=command.name, parent=above)
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    params = [param for param in command.params if isinstance(param, click.Option)]
    options = [record for param in params if (record := param.get_help_record(context)) is not None]
    table = ["| option | |", "|---|---|", *(f"| `{names}` | {_cell(text)} |" for names, text in options)]
    parts = [
        f"## {command.name}",
        f"```text\n{usage}\n```",
        _paragraphs(command.help),
        *(["\n".join(table)] * bool(options)),
    ]
    return "\n\n".join(parts) + "\n"


def _paragraphs(text: str | None) -> str:
    return "\n\n".join(" ".join(part.split()) for part in (text or "").split("\n\n"))
