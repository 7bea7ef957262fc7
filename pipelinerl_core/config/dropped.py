"""Dropped keys: ignored in the stored configuration of an earlier version, refused in a new configuration."""

from collections.abc import Mapping, Sequence
from typing import Any

DROPPED = {
    "placement.hub_local": "dropped after 0.1.0: roles on the hub's host use Arrow Flight like all others",
}
"""Dotted key -> since which version it is dropped and what replaces it, for the error of a new configuration."""


def without_dropped(values: Mapping[str, Any]) -> dict[str, Any]:
    """A stored configuration without dropped keys."""
    kept = dict(values)
    for key in DROPPED:
        section, _, name = key.partition(".")
        if isinstance(kept.get(section), Mapping):
            kept[section] = {known: value for known, value in kept[section].items() if known != name}
    return kept


def overrides_without_dropped(overrides: Sequence[str]) -> tuple[str, ...]:
    """Stored `section.key=value` overrides without overrides of dropped keys."""
    return tuple(override for override in overrides if override.partition("=")[0] not in DROPPED)
