"""Files behind any fsspec URL: each call to a store that is not local has an end, and each failure names the URL."""

import math
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from pipeline.config import without_passwords
from pipeline.core.errors import ConfigError, RunError

NOT_THERE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
CALL_S = 60.0
"""How long one call may take, and longer for large files. None reads or writes more than one."""
_SLOWEST_BYTES_PER_S = 4e6
_PROBE_S = 30.0
_ONE_PROCESS = "memory"

T = TypeVar("T")


class Files:
    """One file system. `root` is the URL's path in it. A local one is called directly.

    `read` and `change` call a method of fsspec by name. Raise RunError with the URL for whatever a remote store raises
    (but what says that something is not there, from `read`), or if it does not answer in time.
    """

    def __init__(self, uri: str) -> None:
        """A path is local whatever is in it: to fsspec `::` chains file systems."""
        self.uri = uri
        if os.path.isabs(uri):
            self.fs, self.root = LocalFileSystem(), LocalFileSystem._strip_protocol(uri)
        else:
            self.fs, self.root = fsspec.url_to_fs(uri)
        self.is_local = isinstance(self.fs, LocalFileSystem)
        self._until, self._limit = math.inf, ""

    def limit(self, until: float, name: str) -> None:
        """All calls from now on end by `until` (monotonic), which is the setting `name`."""
        self._until, self._limit = until, name

    def read(self, call: str, *args: Any, num_bytes: int = 0, **options: Any) -> Any:
        """`num_bytes`: how much it is, where that may be much."""
        try:
            return self._call(call, args, options, CALL_S + num_bytes / _SLOWEST_BYTES_PER_S)
        except NOT_THERE:
            raise
        except Exception as error:  # each store has its own kinds
            if self.is_local:
                raise
            raise self._failure(call, args, error) from error

    def change(self, call: str, *args: Any, **options: Any) -> None:
        try:
            self._call(call, args, options, math.inf if self._limit else CALL_S)
        except Exception as error:
            if self.is_local:
                raise
            raise self._failure(call, args, error) from error

    def forget(self) -> None:
        """What others did since is seen by the next call."""
        self.fs.invalidate_cache()

    def is_there(self, path: str) -> bool:
        """fsspec's own `exists` takes any trouble for a no."""
        try:
            self.read("info", path)
        except NOT_THERE:
            return False
        return True

    def _call(self, call: str, args: tuple[Any, ...], options: dict[str, Any], limit_s: float) -> Any:
        method = getattr(self.fs, call)
        if self.is_local:
            return method(*args, **options)
        left = self._until - time.monotonic()
        limit = self._limit if left < limit_s else f"{limit_s:g} s"
        return within(min(left, limit_s), limit, lambda: method(*args, **options))

    def _failure(self, call: str, args: tuple[Any, ...], error: Exception) -> RunError:
        return RunError(f"{without_passwords(self.uri)}: {call} of {args[0]} failed: {describe(error)}")


def within(limit_s: float, limit: str, call: Callable[[], T]) -> T:
    """The call's result, if it comes in time; else TimeoutError that names the `limit`. A client of a store may try
    for ever: its thread is left behind."""
    results: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            results.put((call(), None))
        except BaseException as error:
            results.put((None, error))

    if limit_s > 0:
        threading.Thread(target=work, name="remote call", daemon=True).start()
        with suppress(queue.Empty):
            result, error = results.get(timeout=limit_s)
            if error is not None:
                raise error
            return result  # type: ignore[return-value]
    raise TimeoutError(f"no answer within {limit}")


def describe(error: BaseException) -> str:
    return without_passwords(f"{type(error).__name__}: {error}")


def refuse_unusable(key: str, uri: str) -> None:
    """Raise ConfigError for a URL that other processes cannot see, or for whose protocol something is missing."""
    protocols = [part.partition("://")[0] for part in uri.split("::") if "://" in part]
    if _ONE_PROCESS in protocols:
        raise ConfigError(
            f"{key} {uri!r}: memory:// lives in one process, a run has many; valid: a path, or the URL of a store that "
            "all nodes reach, such as s3://bucket/folder"
        )
    for protocol in protocols:
        try:
            fsspec.get_filesystem_class(protocol)
        except ValueError:
            raise ConfigError(f"{key} {without_passwords(uri)!r}: fsspec knows no protocol {protocol!r}") from None
        except ImportError as error:
            raise ConfigError(f"{key} {without_passwords(uri)!r}: a package is missing: {error}") from None


def check_store(key: str, uri: str) -> None:
    """Raise ConfigError unless files can be written below `uri`, listed, read and removed, with the credentials of
    here and now. A small file is put there for that."""
    if "://" not in uri:
        return
    refuse_unusable(key, uri)
    content = b"pivot-pipeline looks whether it can write here"
    steps = []

    def probe() -> None:
        files = Files(uri)
        path = f"{files.root}/.probe-{uuid.uuid4().hex}"
        steps.append("written")
        if files.is_local:
            os.makedirs(files.root, mode=0o700, exist_ok=True)
        files.fs.pipe_file(path, content)
        steps.append("read")
        if files.fs.cat_file(path) != content:
            raise OSError("it holds something else than was written")
        steps.append("listed")
        files.fs.invalidate_cache()
        if not any(name.endswith(path.rpartition("/")[2]) for name in files.fs.ls(files.root, detail=False)):
            raise OSError("what was written is not in the list")
        steps.append("removed")
        files.fs.rm_file(path)

    try:
        within(_PROBE_S, f"{_PROBE_S:g} s", probe)
    except Exception as error:
        raise ConfigError(
            f"{key} {without_passwords(uri)!r}: a file cannot be {steps[-1] if steps else 'written'} there: "
            f"{describe(error)}; credentials and endpoint come from the environment, as the store's own tools take them"
        ) from None
