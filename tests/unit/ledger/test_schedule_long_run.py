"""2,000 steps in which over a third of all groups are lost: the admission window never runs dry.

Of 100 groups 30 are filtered, 5 fail and 2 take so long that they are dropped (stale=drop). The same run under a
formula that counts every group that was ever accepted stops for good after a few steps.
"""

from collections import Counter

from pipelinerl_core.config import RunConfig
from pipelinerl_core.ledger import Ledger
from pipelinerl_core.ledger.schedules import GroupCounts, Pipeline, Schedule
from pipelinerl_core.models.resolve import build_config
from tests.scripted_run import Script, ScriptedRun

STEPS, NUM, MAX_LAG = 2000, 4, 3
CONFIG = build_config(
    {
        "rollouts": {"group_size": 2, "filter_zero_variance": True},
        "engine": {"concurrency": 20},
        "schedule": {"max_lag": MAX_LAG, "stale": "drop"},
        "trainer": {"groups_per_step": NUM, "steps": STEPS},
    }
)


def place(group_id: int) -> int:
    """0 .. 99, every hundred groups in another order than they come: 37 has no divisor in common with 100."""
    return 37 * group_id % 100


def rewards(group_id: int) -> tuple[float, ...]:
    if place(group_id) < 30:
        return (1.0, 1.0)  # filtered
    return () if place(group_id) < 35 else (0.0, 1.0)  # failed, or trained


# A step takes at least 2 units. A group of 30 outlives max_lag + 1 of them, so its first tokens die before it ends.
SCRIPT = Script(
    group_units=lambda group_id: 30 if place(group_id) in (35, 36) else 1 + place(group_id) % 5,
    step_units=lambda step: 2,
    rewards=rewards,
)


class CumulativeAdmission(Pipeline):
    """Admission by accepted + running <= (max_lag + version + 1) * groups_per_step, as elsewhere.

    `accepted` counts every group that was ever taken in and forgets none: a group that is filtered, failed or dropped
    keeps its place for ever, although no step will train it.
    """

    ledger: Ledger
    """Set once it exists."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self._max_lag = config.schedule.max_lag

    def grantable_groups(self, counts: GroupCounts, engine_version: int) -> int:
        ever_leased = self.ledger.next_group_id - self.ledger.num_queued
        accepted = ever_leased - counts.leased
        return (self._max_lag + counts.newest_version + 1) * self._num - accepted - counts.leased


def simulate(schedule: Schedule | None = None) -> ScriptedRun:
    run = ScriptedRun(CONFIG, SCRIPT, schedule=schedule)
    if isinstance(schedule, CumulativeAdmission):
        schedule.ledger = run.ledger
    run.join("a")
    return run


def test_2000_steps_with_37_percent_of_all_groups_lost_never_stall():
    run = simulate()
    while not run.ledger.is_done:
        before = run.ledger.committed_step
        run.run(max_units=50)
        assert run.ledger.committed_step > before, run.log[-20:]
    fates = Counter(fate for _, fate in run.fates)
    assert fates["trained"] == STEPS * NUM
    total = sum(fates.values())
    assert {fate: round(100 * number / total) for fate, number in fates.items()} == {
        "trained": 63,
        "filtered": 30,
        "failed": 5,
        "dropped_stale": 2,
    }
    tokens = run.ledger.tokens()
    assert tokens["generated"] == sum(number for name, number in tokens.items() if name != "generated")


def test_the_cumulative_formula_stalls_in_the_same_run():
    # 63 of 100 groups are trained, so the first n steps use up n * N / 0.63 groups, and until step n is committed the
    # formula admits (max_lag + n) * N in all. The two meet at n = max_lag * 0.63 / 0.37 = 5.1: about there is the
    # last step for which N trainable groups are ever admitted. It is 6: of the first 40 groups 26 could be trained.
    run = simulate(CumulativeAdmission(CONFIG))
    assert not run.run(max_units=500)
    stalled_at = run.ledger.committed_step
    assert stalled_at == 6
    assert run.ledger.next_group_id == (MAX_LAG + stalled_at + 1) * NUM  # all that it admits before version 7
    assert (run.ledger.num_leased, run.ledger.num_ready) == (0, 2)  # and of these nothing more will come
    assert not run.run(max_units=5000)
    assert run.ledger.committed_step == stalled_at


def test_nothing_is_wrong_with_the_cumulative_formula_while_nothing_is_lost():
    config = build_config(CONFIG.model_dump() | {"trainer": {"groups_per_step": NUM, "steps": 100}})
    schedule = CumulativeAdmission(config)
    run = ScriptedRun(config, Script(group_units=lambda group_id: 2), schedule=schedule)
    schedule.ledger = run.ledger
    run.join("a")
    assert run.run(max_units=1000)
