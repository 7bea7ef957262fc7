"""Creates an object at most once on a store that has no conditional write.

Each writer writes a mark under a name of its own, then lists the marks of the key. A writer that finds no other mark
writes the object and keeps its mark; a writer that finds another mark removes its own and tries again later. Two
writers cannot both find their mark alone: the writer that lists later finds the mark of the other.

This holds if a list has every object whose write has ended before the list begins (S3 and its compatible servers
guarantee this), whatever the speed of writers, network and store. If a writer dies between its mark and the object,
no writer can create the object.
"""

import random
import time
import uuid

from pipelinerl_core.interfaces import ObjectStore

MARKS_PREFIX = "marks"
"""marks/<key>/<name>: the marks of the writers of a key."""
_ATTEMPTS = 6
_PAUSE_SECONDS = 0.1


def create_exclusively(store: ObjectStore, key: str, data: bytes) -> None:
    """Write an object that does not exist. Raises FileExistsError if it exists, or if other writers try as well."""
    pause_seconds = _PAUSE_SECONDS
    for _ in range(_ATTEMPTS):
        if store.exists(key):
            raise FileExistsError(f"{store.url}/{key} exists already")
        mark = f"{MARKS_PREFIX}/{key}/{uuid.uuid4().hex}"
        store.put(mark, b"")
        if store.list(f"{MARKS_PREFIX}/{key}") == [mark]:
            store.put(key, data)
            return
        store.delete([mark])
        time.sleep(pause_seconds * random.uniform(0.5, 1.5))
        pause_seconds *= 2
    others = ", ".join(store.list(f"{MARKS_PREFIX}/{key}"))
    raise FileExistsError(
        f"{store.url}/{key} is not created: another process creates it, or has died while it did. If no process of "
        f"the run lives, remove {others or 'its marks'}"
    )
