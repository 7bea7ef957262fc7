"""How many groups may still be leased: the window that bounds the lag."""

from pipelinerl_core.config import RunConfig


def free_places(config: RunConfig, *, num_outstanding: int, committed_step: int, engine_version: int) -> int:
    """Groups that an actor whose engine samples with `engine_version` may be granted now.

    num_outstanding: groups leased, ready, or reserved for a version that is not committed. Steps that the actor has
    not seen count like reserved ones. A group granted in the last free place waits for at most W - 1 others, hence is
    trained by step engine_version + 1 + max_lag, at a lag of max_lag.
    """
    unseen_steps = max(0, max(committed_step, 0) - engine_version)
    free = config.window_groups - num_outstanding - unseen_steps * config.trainer.groups_per_step
    return max(0, free)
