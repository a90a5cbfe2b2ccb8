from pathlib import Path

import pytest

from pipeline import compose
from pipeline.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("-1E+3", -1000.0),
        (".5", 0.5),
        ("10", 10),
        ("0x10", 16),
        ("true", True),
        ("~", None),
        # text in YAML 1.2, and in the mind of who writes it
        ("no", "no"),
        ("on", "on"),
        ("2026-01-01", "2026-01-01"),
        ("1:30", "1:30"),
        ("010", "010"),
        ("1_000", "1_000"),
        ("'1e-6'", "1e-6"),
        ("1e", "1e"),
        ("s3://bucket/a=b", "s3://bucket/a=b"),
    ],
)
def test_plain_scalars_are_what_they_look_like(text: str, value: object) -> None:
    parsed = compose.parse(f"a: {text}", "f.yaml")["a"]
    assert parsed == value and type(parsed) is type(value)


def test_keys_are_text() -> None:
    assert compose.parse("{yes: 1, no: 0, 1: 2, true: 3, 1.5: 4}", "f") == {
        "yes": 1,
        "no": 0,
        "1": 2,
        "true": 3,
        "1.5": 4,
    }


def test_anchors_and_merge_keys() -> None:
    assert compose.parse("x: &x {a: 1, b: 2}\ny: {<<: *x, b: 3}", "f")["y"] == {"a": 1, "b": 3}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainer:\n  lr: 1\n  lr: 2\n", "f.yaml, line 2, column 3: the key 'lr' stands here twice"),
        ("a: [1, 2", "f.yaml, line 1"),
        ("a: 1\n b: 2\n", "f.yaml, line 2"),
        ("{[1]: 2}", "a key is text"),
        ("a: !!python/object:os.system x", "f.yaml, line 1"),
        ("a: \x00", "f.yaml"),
    ],
)
def test_bad_yaml_says_where(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"f\.yaml") as caught:
        compose.parse(text, "f.yaml")
    assert message in str(caught.value)


def test_what_is_dumped_reads_back_the_same() -> None:
    texts = [
        "1e-6",
        "no",
        "true",
        "~",
        "",
        ".5",
        "010",
        "2026-01-01",
        "<<",
        "a: b # c",
        "l1\n  l2 \n",
        "\x1b[2J",
        "é\t",
    ]
    tree: compose.Tree = {
        "texts": texts,
        "numbers": [1e-6, 1e22, 3, -0.5, 0.1 + 0.2],
        "others": [True, None, [], {}],
        "keys": {text or "empty": 1 for text in texts},
    }
    assert compose.parse(compose.dump(tree), "f") == tree


def test_long_text_is_dumped_readably() -> None:
    assert compose.dump({"template": "Was {{ a }}\nright?\n"}) == "template: |\n  Was {{ a }}\n  right?\n"


def test_mappings_merge_deeply_and_lists_are_replaced() -> None:
    left = {"a": {"x": 1, "y": [1, 2]}, "b": 1, "c": {"z": 1}}
    right = {"a": {"y": [3]}, "b": {"w": 2}, "c": 5}
    assert compose.merge(left, right) == {"a": {"x": 1, "y": [3]}, "b": {"w": 2}, "c": 5}
    assert left == {"a": {"x": 1, "y": [1, 2]}, "b": 1, "c": {"z": 1}}


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("trainer.lr=1e-6", ("trainer", "lr"), 1e-6),
        ("data.val_files=[a, b]", ("data", "val_files"), ["a", "b"]),
        ("cluster.env.A=x=y", ("cluster", "env", "A"), "x=y"),
        ("tracking.uri=", ("tracking", "uri"), ""),
        ("a=null", ("a",), None),
        ("a={b: 1}", ("a",), {"b": 1}),
    ],
)
def test_overrides(text: str, path: tuple[str, ...], value: object) -> None:
    assert compose.parse_override(text) == (path, value)


@pytest.mark.parametrize("text", ["=1", "a..b=1", ".a=1", "a.=1", "a=[1"])
def test_bad_overrides_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        compose.parse_override(text)


def test_files_that_are_no_configuration(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("")
    assert compose.read_tree(path) == {}
    for content in (b"[1]", b"text", b"\xff\xfe\x00"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"c\.yaml"):
            compose.read_tree(path)
