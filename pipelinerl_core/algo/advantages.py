"""Credit assignment: how much better than its siblings a rollout was."""

from collections.abc import Sequence


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """Advantages of the scored rollouts of one group: A_i = r_i - mean of the other rewards.

    The baseline of a rollout does not contain its own reward, so the gradient estimate is unbiased (RLOO,
    arXiv:2402.14740). Rollouts without a reward are left out by the caller: they are neither trained nor a baseline.

    Example: [1, 0, 0, 1] -> [2/3, -2/3, -2/3, 2/3]; with the last one unscored, [1, 0, 0] -> [1, -1/2, -1/2].

    Raises ValueError for fewer than two rewards: such a group has no baseline and is `failed` in the ledger.
    """
    if len(rewards) < 2:
        raise ValueError(
            f"a group with {len(rewards)} scored rollouts has no leave-one-out baseline: at least 2 are needed. "
            "Count it as failed and do not reserve it"
        )
    total = sum(rewards)
    return [reward - (total - reward) / (len(rewards) - 1) for reward in rewards]
