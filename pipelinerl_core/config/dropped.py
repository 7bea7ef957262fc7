"""Keys that are gone: a stored run of an earlier version may have them, and they are ignored; nothing else may."""

from collections.abc import Mapping, Sequence
from typing import Any

DROPPED = {
    "placement.hub_local": "dropped after 0.1.0: roles on the hub's host use Arrow Flight like all others",
}
"""Dotted key -> since when and what is so now, for the one line that refuses the key in a new configuration."""


def without_dropped(values: Mapping[str, Any]) -> dict[str, Any]:
    """A stored configuration without the keys that are gone."""
    kept = dict(values)
    for key in DROPPED:
        section, _, name = key.partition(".")
        if isinstance(kept.get(section), Mapping):
            kept[section] = {known: value for known, value in kept[section].items() if known != name}
    return kept


def overrides_without_dropped(overrides: Sequence[str]) -> tuple[str, ...]:
    """Stored `section.key=value` overrides without those of keys that are gone."""
    return tuple(override for override in overrides if override.partition("=")[0] not in DROPPED)
