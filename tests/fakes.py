"""A store in memory that shares no objects with other stores."""

import itertools

from pipelinerl_core.storage import local

_NUMBERS = itertools.count()


class MemoryStore(local.MemoryStore):
    """An empty store under a memory:// name that no other store has."""

    def __init__(self) -> None:
        super().__init__(f"test-{next(_NUMBERS)}")
