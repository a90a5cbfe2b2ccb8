"""Where a page is written to: whether it can be is asked before it takes time to make it."""

from pathlib import Path

from pipeline.core.errors import ConfigError


def check_page(path: Path, option: str, example: str) -> None:
    """Whether the page can be written at all. `option`: that named it. Raises ConfigError."""
    if path.is_dir():
        raise ConfigError(f"{option} {path}: is a folder; valid: a file in it, such as {path / example}")
    if path.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"{option} {path}: valid: a file that ends in .html, such as {path}.html")
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {path.parent}")
    try_file(path, f"{option} {path}")


def try_file(path: Path, named: str) -> None:
    """Leaves it as it was, there or not. Raises ConfigError."""
    is_new = not path.exists()
    try:
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{named}: cannot be written: {error.strerror}") from error
