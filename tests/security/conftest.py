from tests.stages.conftest import queue_client

__all__ = ["queue_client"]
