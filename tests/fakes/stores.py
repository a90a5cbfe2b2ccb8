"""Real weight stores for tests, gone afterwards."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.gps.store import Store


@contextmanager
def weight_store(model_path: str | Path, dtype: str = "float32") -> Iterator[Store]:
    """A store of the model as version 0."""
    store = Store.create(f"pivot-{os.getuid()}-test{uuid.uuid4().hex[:12]}-1-n0-policy", str(model_path), dtype, 0)
    try:
        yield store
    finally:
        store.unlink()
