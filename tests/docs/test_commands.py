"""Every command of README and docs is one that exists; those that cost little are run."""

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import click
import pytest

from pipeline.cli.commands import commands
from pipeline.cli.main import run
from pipeline.config import load_files
from pipeline.core.errors import ConfigError
from tests.architecture.sources import ROOT, relative
from tests.cli.conftest import COMMAND, environment
from tests.docs.console import REASONS, Block, Command, blocks, console, inline, pages

USERS = dict.fromkeys(("run.yaml", "mine.yaml", "my_run.yaml"), ROOT / "configs" / "emulated.yaml")
"""Configurations that pages call the reader's own, and what stands for them."""
OTHERS = {"git", "cd", "cat", "mkdir", "sudo", "salloc", "ls", "export", ".", "pip", "timeout", "echo"}
"""What readers type beside our own commands."""
COMPOSED = ("submit", "validate", "dag", "simulate", "doctor", "plan", "compare")
"""Commands whose arguments are configurations and settings (of plan and compare, or runs)."""

WITH_COMMANDS = [page for page in pages() if console(page)]


def cheap(page: Path) -> list[Command]:
    """Our own commands of blocks that nothing keeps from being run."""
    return [c for block in console(page) if not block.reason for c in block.commands() if c.is_ours]


def place(folder: Path, found: Iterable[Block]) -> None:
    """The files that commands of a page may name."""
    for name, source in USERS.items():
        shutil.copy(source, folder / name)
    for block in found:
        for name, text in block.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")


def fault(command: Command) -> str:
    """What is wrong with a command; "" for nothing."""
    program = Path(command.words[0]).name or command.words[0]
    if command.is_ours:
        return parse(command.arguments)
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
        return "".join(f"no target {word}" for word in command.words[1:] if word not in targets and "=" not in word)
    if program == "python" and command.words[1] == "-m":
        return "" if importlib.util.find_spec(command.words[2]) else f"no module {command.words[2]}"
    if program == "python":
        return script_fault(command.words[1], command.words[2:])
    return "" if program in OTHERS else f"nobody knows {program}"


def script_fault(name: str, options: Iterable[str]) -> str:
    if not (ROOT / name).is_file():
        return "" if Path(name).is_file() else f"no script {name}"  # or one that the page has written
    source = (ROOT / name).read_text(encoding="utf-8") + (ROOT / "benchmarks" / "harness.py").read_text()
    return "".join(f"{name} has no {word}" for word in options if word.startswith("--") and f'"{word}"' not in source)


def parse(arguments: list[str]) -> str:
    """What the command line, or the configuration that it composes, does not understand."""
    try:
        name, command, rest = commands.resolve_command(click.Context(commands), arguments)
        assert command is not None
        given = command.make_context(name, list(rest)).params
        settings = [f"cluster.kind={given['cluster']}"] if given.get("cluster") else []
        if name in COMPOSED:
            words = list(given.get("config") or given.get("what") or ())
            if words and "RUN" not in words:
                load_files([word for word in words if "=" not in word], [*(w for w in words if "=" in w), *settings])
        elif name == "resume":
            load_files(["emulated.yaml"], [*given["settings"], *settings])
    except (click.ClickException, ConfigError) as error:
        return str(error) or type(error).__name__
    return ""


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=relative)
def test_each_command_is_one_that_exists(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = console(page)
    place(tmp_path, found)
    monkeypatch.chdir(tmp_path)
    typed = [command for block in found for command in block.commands()]
    assert typed
    assert {str(command): why for command in typed if (why := fault(command))} == {}


@pytest.mark.parametrize("page", [page for page in WITH_COMMANDS if cheap(page)], ids=relative)
def test_commands_that_cost_little_do_what_is_said(
    page: Path, done: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place(done, [])
    monkeypatch.chdir(done)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for command in cheap(page):
        if command.arguments[0] == "submit":
            ended = subprocess.run(
                [*COMMAND, *command.arguments], env=environment(), capture_output=True, text=True, check=False
            )
            assert ended.returncode == 0, f"{command}\n{ended.stdout}{ended.stderr}"
        else:
            code = run(command.arguments)
            printed = capsys.readouterr()
            assert code == 0 and printed.out, f"{command}\n{printed.out}{printed.err}"


@pytest.mark.parametrize("page", pages(), ids=relative)
def test_no_command_hides_in_another_kind_of_block(page: Path) -> None:
    for block in blocks(page):
        assert not block.reason or block.reason in REASONS, f"{block.reason}: valid are {', '.join(REASONS)}"
        hidden = re.findall(r"^(?:\$ )?(?:pivot-pipeline|make) .*", block.text, re.M)
        assert not hidden or block in console(page) or block.language == "text", f"```sh for {hidden[0]}"


def test_commands_in_sentences_have_options_that_exist() -> None:
    wrong = []
    for page in pages():
        for words in inline(page):
            command = commands.commands.get(words[0])
            known = {option for param in command.params for option in param.opts} if command else set()
            known |= {option for param in command.params for option in param.secondary_opts} if command else set()
            options = [word for word in words if re.match(r"--?[a-z]", word)]
            if command is None or not known.issuperset(options):
                wrong.append(f"{relative(page)}: pivot-pipeline {' '.join(words)}")
    assert wrong == []


@pytest.mark.parametrize(
    ("typed", "why"),
    [
        ("pivot-pipeline submitt run.yaml", "No such command"),
        ("pivot-pipeline report RUN --fast", "No such option"),
        ("pivot-pipeline watch", "Missing parameter: run"),
        ("pivot-pipeline submit gone.yaml", "gone.yaml"),
        ("pivot-pipeline submit emulated.yaml trainer.lrr=1", "trainer.lr"),
        ("pivot-pipeline resume RUN trainer.rank=1", "trainer.rank"),
        ("make demos", "no target"),
        ("python benchmarks/gone.py", "no script"),
        ("python benchmarks/cli.py --many", "has no --many"),
        ("python -m tests.gone", "no module"),
        ("frobnicate", "nobody knows"),
    ],
)
def test_a_command_that_does_not_exist_is_found(typed: str, why: str) -> None:
    (command,) = Block(ROOT / "README.md", "sh", typed, "").commands()
    assert why in fault(command)
