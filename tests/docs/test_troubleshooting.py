"""docs/troubleshooting.md quotes messages: each is one that the code says."""

import ast
import re

from tests.architecture.sources import ROOT, modules

PAGE = ROOT / "docs" / "troubleshooting.md"
_VARIES = "\0"


def quoted(text: str) -> list[str]:
    """Symptoms that are a message: first cells of rows that are nothing but a quotation."""
    return re.findall(r"^\| `([^`|]+)` \|", text, re.MULTILINE)


def said() -> str:
    """All texts of the code; what varies in one is marked."""
    found = []
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(v.value if isinstance(v, ast.Constant) else _VARIES for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def unsaid(messages: list[str], code: str) -> list[str]:
    parts = {
        message: [part.strip() for part in message.split("...") if re.search(r"\w{2}", part)] for message in messages
    }
    return [message for message in messages if not parts[message] or any(p not in code for p in parts[message])]


def test_each_message_that_is_quoted_is_said_by_the_code() -> None:
    messages = quoted(PAGE.read_text(encoding="utf-8"))
    assert len(messages) > 25
    assert unsaid(messages, said()) == []


def test_a_message_that_nobody_says_is_found() -> None:
    assert unsaid(["... died ... times without progress: ...", "...", "... never said ..."], said()) == [
        "...",
        "... never said ...",
    ]
