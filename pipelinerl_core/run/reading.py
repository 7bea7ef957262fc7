"""Reading of a run's JSON records: parse, check the format version, then validate fields and ranges."""

import logging
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from pipelinerl_core.errors import BrokenRecord, MissingObject
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.ranges import first_error
from pipelinerl_core.run.records import FORMAT_VERSION, KEY_PATTERNS, Record

R = TypeVar("R", bound=Record)

logger = logging.getLogger(__name__)

_foreign: set[str] = set()


def list_keys(store: ObjectStore, prefix: str) -> list[str]:
    """The keys of a run under one of KEY_PATTERNS, or under a part of it, sorted.

    A file with another name, such as an editor's backup, is named once in the log and left out.
    """
    prefix = prefix.rstrip("/")
    pattern = next(candidate for folder, candidate in KEY_PATTERNS.items() if f"{prefix}/".startswith(f"{folder}/"))
    keys = store.list(prefix)
    for key in (key for key in keys if not pattern.fullmatch(key)):
        if (name := f"{store.url}/{key}") not in _foreign:
            _foreign.add(name)
            logger.warning("%s is no object of a run and is left out", name)
    return [key for key in keys if pattern.fullmatch(key)]


def read_record(store: ObjectStore, key: str, model: type[R]) -> R:
    """Read one JSON object of a run. Raises MissingObject, or BrokenRecord for another format or an invalid
    object."""
    return parse_record(store.get(key), f"{store.url}/{key}", model)


def find_record(store: ObjectStore, key: str, model: type[R]) -> R | None:
    """`read_record`, or None if there is no such object."""
    try:
        return read_record(store, key, model)
    except MissingObject:
        return None


def parse_record(data: bytes, where: str, model: type[R]) -> R:
    """Parse one JSON object of a run, stored at `where`. Raises BrokenRecord as `read_record`."""
    try:
        values = from_json(data)
    except ValueError as error:
        raise BrokenRecord(f"{where} is not a valid {model.__name__}: not JSON, {error}") from None
    format_version = values.get("format_version", FORMAT_VERSION) if isinstance(values, dict) else FORMAT_VERSION
    if format_version != FORMAT_VERSION:  # checked first, because another format may have other fields
        raise BrokenRecord(
            f"{where} has format_version {format_version!r:.40}; this version of pipelinerl reads {FORMAT_VERSION}. "
            "Read the run with the version that wrote it"
        )
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise BrokenRecord(f"{where} is not a valid {model.__name__}: {first_error(error)}") from None
