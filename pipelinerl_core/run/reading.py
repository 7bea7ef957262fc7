"""Read a record of a run: parse, check the format version, then the fields and the ranges of numbers."""

import logging
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from pipelinerl_core.errors import BrokenRecord
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.ranges import first_error
from pipelinerl_core.run.records import FORMAT_VERSION, Record

R = TypeVar("R", bound=Record)

logger = logging.getLogger(__name__)

_STATISTICS = (("swaps",), ("actors",))  # of a commit: what actors said of themselves


def read_record(store: ObjectStore, key: str, model: type[R]) -> R:
    """One JSON object of a run. Raises MissingObject, or BrokenRecord for another format or a broken object."""
    data, where = store.get(key), f"{store.url}/{key}"
    try:
        values = from_json(data)
    except ValueError as error:
        raise BrokenRecord(f"{where} is not a valid {model.__name__}: not JSON, {error}") from None
    found = values.get("format_version", FORMAT_VERSION) if isinstance(values, dict) else FORMAT_VERSION
    if found != FORMAT_VERSION:  # before the fields, which may be others
        raise BrokenRecord(
            f"{where} has format_version {found!r:.40}; this version of pipelinerl reads {FORMAT_VERSION}. "
            "Read the run with the version that wrote it"
        )
    try:
        try:
            return model.model_validate(values)
        except ValidationError as error:
            return model.model_validate(_cut_to_range(values, error, where))
    except ValidationError as error:
        raise BrokenRecord(f"{where} is not a valid {model.__name__}: {first_error(error)}") from None


def _cut_to_range(values: Any, error: ValidationError, where: str) -> Any:
    """The values of a commit whose statistics are out of their range, each put to the end of the range.

    An earlier release took any number of an actor's in; nothing goes by these. Raises `error` if more is wrong.
    """
    for one in error.errors():
        limit = one.get("ctx", {}).get("le", one.get("ctx", {}).get("ge"))
        path = one["loc"]
        if limit is None or path[:1] not in _STATISTICS:
            raise error
        inner = values
        for part in path[:-1]:
            inner = inner[part]
        inner[path[-1]] = limit
        logger.warning("%s: %s is out of its range and read as %g", where, ".".join(map(str, path)), limit)
    return values
