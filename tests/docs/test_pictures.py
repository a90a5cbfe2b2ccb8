"""The drawings of docs/ are those that docs/pictures.py makes, and can be read."""

import importlib.util
import xml.etree.ElementTree as ET
from types import ModuleType

import pytest

from tests.architecture.sources import ROOT


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs" / "pictures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_drawings_are_those_of_their_script(pictures: ModuleType) -> None:
    drawn = pictures.drawn()
    assert set(drawn) == set((ROOT / "docs" / "pictures").glob("*.svg"))
    for path, content in drawn.items():
        assert path.read_text(encoding="utf-8") == content, f"{path.name}: python docs/pictures.py"


def test_each_drawing_has_a_title_and_a_background_and_loads_nothing(pictures: ModuleType) -> None:
    for path, content in pictures.drawn().items():
        root = ET.fromstring(content)
        assert root.findtext("{http://www.w3.org/2000/svg}title"), path.name
        assert next(iter(root.iter("{http://www.w3.org/2000/svg}rect"))).get("width") == root.get("width")
        assert content.count("http") == 1, path.name  # the namespace


def test_what_is_written_on_a_colour_can_be_read(pictures: ModuleType) -> None:
    """Contrast of WCAG 2: 3 for the bold names of roles, 4.5 for all else."""
    for look in (pictures.LIGHT, pictures.DARK):
        for ink in (look.front, look.faint):
            assert contrast(ink, look.back) >= 4.5, (look.name, ink)
        assert contrast(look.front, look.box) >= 4.5
        for role in ("rollout", "reward", "train"):
            assert contrast(pictures.ink(look, role), getattr(look, role)) >= 3, (look.name, role)


def contrast(one: str, other: str) -> float:
    dark, light = sorted(luminance(colour) for colour in (one, other))
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
