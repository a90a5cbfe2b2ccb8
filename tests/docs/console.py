"""What the documentation tells its readers to type: commands in fenced blocks of `sh`, and in the middle of sentences.

A block is run by tests/docs/test_commands.py unless the line above it says why not:

    <!-- parsed only: minutes -->

`make` and benchmarks are never run there: that their targets, scripts and options exist is all that is asked. Of
`cat > FILE <<'EOF'` the file is written.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.architecture.sources import ROOT, own_files

REASONS = ("minutes", "a cluster", "a GPU", "a model of yours", "a server")
"""Why a block is parsed only: it takes minutes (or real engines), or needs what a test has not."""
SHELLS = ("sh", "bash", "console")
_BLOCK = re.compile(
    r"(?:^<!-- parsed only: (?P<reason>.*?) -->\n\s*)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)
_INLINE = re.compile(r"(?<!`)`pivot-pipeline\s+([^`]+)`(?!`)")
_HERE = re.compile(r"cat > (?P<file>\S+) <<'(?P<end>\w+)'\n(?P<text>.*?)^(?P=end)$\n?", re.M | re.S)


@dataclass(frozen=True)
class Block:
    page: Path
    language: str
    text: str
    reason: str
    """Why it is parsed only; empty: it is run."""

    @property
    def files(self) -> dict[str, str]:
        """What its `cat > FILE <<'EOF'` write."""
        return {found["file"]: found["text"] for found in _HERE.finditer(self.text)}

    def commands(self) -> Iterator["Command"]:
        text = _HERE.sub("", self.text).replace("\\\n", " ")
        for line in text.splitlines():
            words = shlex.split(line, comments=True)
            start = 0
            for end in [*(number for number, word in enumerate(words) if word in ("&&", "||", "|", ";")), len(words)]:
                if words[start:end]:
                    yield Command(self, tuple(words[start:end]))
                start = end + 1


@dataclass(frozen=True)
class Command:
    block: Block = field(repr=False)
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.block.page.relative_to(ROOT)}: {' '.join(self.words)}"

    @property
    def is_ours(self) -> bool:
        names = [Path(word).name for word in self.words]
        return names[0] == "pivot-pipeline" or (names[0] == "timeout" and "pivot-pipeline" in names)

    @property
    def arguments(self) -> list[str]:
        """Of `pivot-pipeline`: what follows it, up to where its output goes."""
        names = [Path(word).name for word in self.words]
        rest = list(self.words[names.index("pivot-pipeline") + 1 :])
        return rest[: next((number for number, word in enumerate(rest) if word in (">", "2>", "&")), len(rest))]


def pages() -> list[Path]:
    return own_files("*.md")


def blocks(page: Path) -> list[Block]:
    return [
        Block(page, found["language"], found["text"], found["reason"] or "")
        for found in _BLOCK.finditer(page.read_text(encoding="utf-8"))
    ]


def console(page: Path) -> list[Block]:
    """Blocks that are to be typed."""
    return [block for block in blocks(page) if block.language in SHELLS]


def inline(page: Path) -> list[list[str]]:
    """Commands in sentences and tables, as usage is written: [--step N], RUN, CONFIG..."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return [found[1].replace("[", " ").replace("]", " ").split() for found in _INLINE.finditer(text)]
