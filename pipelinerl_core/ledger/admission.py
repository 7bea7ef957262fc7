"""How many groups may still be leased: the window that bounds the lag."""

from pipelinerl_core.config import RunConfig
from pipelinerl_core.errors import ConfigError


def free_places(config: RunConfig, *, num_outstanding: int, committed_step: int, engine_version: int) -> int:
    """Groups that an actor whose engine samples with `engine_version` may be granted now.

    num_outstanding: groups leased, ready, or reserved for a version that is not committed. Steps that the actor has
    not seen count like reserved ones. A group granted in the last free place waits for at most W - 1 others, hence is
    trained by step engine_version + 1 + max_lag, at a lag of max_lag.
    """
    unseen_steps = max(0, max(committed_step, 0) - engine_version)
    free = config.window_groups - num_outstanding - unseen_steps * config.trainer.groups_per_step
    return max(0, free)


def check_window(config: RunConfig) -> None:
    """Refuse a window that closes before the next version is published; raises ConfigError."""
    needed = config.weights.publish_every - 1
    if config.schedule.max_lag < needed:
        raise ConfigError(
            f"weights.publish_every={config.weights.publish_every} leaves actors {needed} steps behind, but "
            f"schedule.max_lag={config.schedule.max_lag}: no group could be leased before the next version. "
            f"Set schedule.max_lag to at least {needed}, or weights.publish_every=1"
        )
