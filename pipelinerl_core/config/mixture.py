"""The parts of a mixture: several prompt sources with their own rewards or environments in one run."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import Field

from pipelinerl_core.config.section import Section
from pipelinerl_core.errors import ConfigError


class MixturePart(Section):
    """One part of a mixture (docs/mixtures.md). A section that the part names replaces the run's section."""

    weight: float = Field(1.0, gt=0)
    """Weight of the part: its share of the groups is its weight over the sum of all weights."""
    prompts: dict[str, Any] = Field({})
    """Keys of [prompts] for this part; without an entry, kind and system are those of [prompts], other keys have
    their defaults. Empty: the [prompts] of the run. Example: mixture.math.prompts.path=math.jsonl."""
    reward: dict[str, Any] = Field({})
    """Keys of [reward] for this part; a key without an entry has its default. Empty: the [reward] of the run."""
    environment: dict[str, Any] = Field({})
    """Keys of [environment] for this part; a key without an entry has its default. Empty: the [environment] of the
    run."""
    max_tokens: int = Field(0, ge=0)
    """Tokens of a completion of this part at most, up to rollouts.max_tokens; 0: rollouts.max_tokens."""


@contextmanager
def naming(name: str, section: str = "mixture") -> Iterator[None]:
    """Put section and name before the message of a ConfigError of the block; name "": a run without a mixture."""
    try:
        yield
    except ConfigError as error:
        raise (ConfigError(f"{section}.{name}: {error}") if name else error) from None
