"""Credit assignment: how much better than its siblings a rollout was, or each of its turns.

Each function except `over_step` takes the scored rollouts of one group. Rollouts without a reward are left out by the
caller: they are neither trained nor part of a baseline. These functions raise ValueError for fewer than two rollouts:
such a group has no baseline and is `failed` in the ledger.

In formulas, A_i and r_i are advantage and reward of rollout i, and n is the number of scored rollouts.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

# Added to each standard deviation, as in the published GRPO code: equal rewards give advantages of 0, not 0 / 0.
_STD_EPSILON = 1e-4


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """Advantages of the scored rollouts of one group: A_i = r_i - mean of the other rewards.

    The baseline of a rollout does not contain its own reward, so the gradient estimate is unbiased (RLOO,
    arXiv:2402.14740).

    Example: [1, 0, 0, 1] -> [2/3, -2/3, -2/3, 2/3]; with the last rollout unscored, [1, 0, 0] -> [1, -1/2, -1/2].
    """
    _check(rewards)
    total = sum(rewards)
    return [reward - (total - reward) / (len(rewards) - 1) for reward in rewards]


def group_mean(rewards: Sequence[float]) -> list[float]:
    """A_i = r_i - mean of all rewards of the group (Dr. GRPO, arXiv:2503.20783): leave-one-out times (n - 1) / n.

    Example: [1, 0, 0, 1] -> [1/2, -1/2, -1/2, 1/2].
    """
    _check(rewards)
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def standardized(rewards: Sequence[float]) -> list[float]:
    """A_i = (r_i - mean) / (std + 1e-4), with the standard deviation of the sample (GRPO, arXiv:2402.03300).

    Groups that are nearly always or nearly never solved weigh more than with `group_mean`.

    Example: [1, 0, 0, 1] has std sqrt(1/3) -> +-0.5 / (0.57735 + 1e-4).
    """
    centred = group_mean(rewards)
    std = math.sqrt(sum(value * value for value in centred) / (len(centred) - 1))
    return [value / (std + _STD_EPSILON) for value in centred]


def max_likelihood(rewards: Sequence[float]) -> list[float]:
    """A_i = (r_i - mean) / mean (MaxRL, arXiv:2602.02710); 0 for a group with a mean of 0 or a reward below 0.

    For rewards of 0 and 1 and a growing group, the expected gradient approaches the gradient of log(success rate),
    instead of the gradient of the success rate: prompts that are rarely solved weigh more.

    Example: [1, 0, 0, 0] has the mean 1/4 -> [3, -1, -1, -1].
    """
    centred = group_mean(rewards)
    mean = sum(rewards) / len(rewards)
    return [value / mean for value in centred] if mean > 0 and min(rewards) >= 0 else [0.0] * len(rewards)


def decoupled(components: Sequence[Sequence[float]], weights: Sequence[float]) -> list[float]:
    """A_i = sum over components k of w_k * (c_ik - mean_k) / (std_k + 1e-4): `standardized` by component.

    components: for each component its values, one per scored rollout of the group; weights: w_k, one per component.
    The first part of GDPO, arXiv:2601.05242; `over_step` is the second part. The spread of a group's advantages shows
    in how many components its rollouts differ, and whether these agree; the standardized weighted sum of the
    components would have the same spread in every group.

    Example: components [1, 0, 1, 0] and [1, 1, 0, 0] -> [1.732, 0, 0, -1.732], and with the weights 1 and 2
    [2.598, 0.866, -0.866, -2.598].
    """
    parts = [standardized(values) for values in components]
    return [sum(weight * part[i] for weight, part in zip(weights, parts, strict=True)) for i in range(len(parts[0]))]


def over_step(groups: Sequence[Sequence[float]]) -> list[list[float]]:
    """A_i / (std + 1e-4), with the sample standard deviation over all rollouts of a step (GDPO): the range of the
    result does not grow with the number of components.

    groups: the advantages of each group, whose sum is 0. The mean over the step is therefore 0 and is not subtracted,
    so advantages of 0 stay exactly 0. At least two advantages in all.
    """
    flat = [advantage for group in groups for advantage in group]
    std = math.sqrt(sum(advantage * advantage for advantage in flat) / (len(flat) - 1))
    return [[advantage / (std + _STD_EPSILON) for advantage in group] for group in groups]


def without_baseline(rewards: Sequence[float]) -> list[float]:
    """A_i = r_i: with loss.advantage=value the learner subtracts the estimated value of each token."""
    _check(rewards)
    return list(rewards)


def per_turn(
    rewards: Sequence[float], num_turns: Sequence[int], turn_rewards: Sequence[Sequence[float]] = ()
) -> list[tuple[float, ...]]:
    """For each rollout one advantage per turn: A_ik = G_ik - mean of G_jk over the siblings j that reached turn k.

    G_ik is the return from turn k on (docs/algorithms.md#turns). num_turns: of each rollout. turn_rewards: for each
    rollout the parts of its reward that belong to single turns, one per turn; empty for a rollout without such parts,
    whose G_ik = r_i for all k. Without such a sibling, A_ik = 0. Raises ValueError also for a rollout without a turn.

    Example: rewards [1, 0, 1] of rollouts with [1, 2, 3] turns -> [(1/2,), (-1, -1), (1/2, 1, 0)]. With rewards
    [3, 1] and turn_rewards [(2, 0), (0, 1)] the returns are (3, 1) and (1, 1), the advantages (2, 0) and (-2, 0).
    """
    _check(rewards)
    parts = turn_rewards or [()] * len(rewards)
    if len(num_turns) != len(rewards) or min(num_turns) < 1:
        raise ValueError(f"{len(rewards)} rollouts with {list(num_turns)} turns: each has at least one")
    by_rollout: list[list[float]] = [[] for _ in rewards]
    for turn in range(max(num_turns)):
        reached = [index for index, num in enumerate(num_turns) if num > turn]
        returns = [rewards[index] - sum(parts[index][:turn]) for index in reached]
        advantages = leave_one_out(returns) if len(returns) > 1 else [0.0]
        for index, advantage in zip(reached, advantages, strict=True):
            by_rollout[index].append(advantage)
    return [tuple(advantages) for advantages in by_rollout]


ADVANTAGES: Mapping[str, Callable[[Sequence[float]], list[float]]] = MappingProxyType(
    {
        "leave_one_out": leave_one_out,
        "group_mean": group_mean,
        "standardized": standardized,
        "max_likelihood": max_likelihood,
        "value": without_baseline,
    }
)
"""loss.advantage -> function from the rewards of a group to one advantage per rollout.

Not here: `turn` (`per_turn`), `decoupled` (`decoupled`, then `over_step`) and `custom` (algo/own.py).
"""


def _check(rewards: Sequence[float]) -> None:
    if len(rewards) < 2:
        raise ValueError(
            f"a group with {len(rewards)} scored rollouts has no baseline: at least 2 are needed. "
            "Count it as failed and do not reserve it"
        )
