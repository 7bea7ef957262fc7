"""How far a replay can answer: until the recorded rollouts no longer represent the policy of the arm.

The importance ratio of a rollout is pi_arm / pi_recorded over its tokens; `ess_sequence` of a step is
(sum w)^2 / (n sum w^2) over the n rollouts of the step (Kong 1992), a share of 1 if both policies are equal. The
recorded run has one of its own, because its rollouts are stale when it trains them. The limit of an arm is relative
to it: long rollouts have a low share also in the recorded run.
"""

import statistics
from collections.abc import Mapping

ESS_SHARE = 0.3
"""Default bound: the share of the recorded run's own effective sample size."""
WINDOW = 5
"""Steps of the mean, because a single step has few rollouts."""


def limit_step(arm: Mapping[int, float], recorded: Mapping[int, float], share: float = ESS_SHARE) -> int | None:
    """First step at which the mean ESS of the arm over the last WINDOW steps is below `share` of the recorded mean.

    arm, recorded: step -> ess_sequence. None: the ESS stays above the bound. Steps without a value in both are left
    out. Example: recorded 0.8 throughout, share 0.5, arm 0.8 0.6 0.2 0.1 at steps 1 to 4: means 0.8 0.7 0.53 0.43,
    never below 0.4; with 0.0 at step 5 the mean is 0.34, and the limit is step 5.
    """
    steps = sorted(arm.keys() & recorded.keys())
    for index, step in enumerate(steps):
        window = steps[max(0, index - WINDOW + 1) : index + 1]
        bound = share * statistics.fmean(recorded[one] for one in window)
        if statistics.fmean(arm[one] for one in window) < bound:
            return step
    return None


def last_valid(limit: int | None, last: int) -> int:
    """Newest weight version that counts: the version before the limit, else the last version."""
    return last if limit is None else limit - 1
