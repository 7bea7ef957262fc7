"""Each schedule against a trace written by hand: every lease, pause, swap, continuation, batch and commit.

Everywhere N = 2 groups per step, 2 rollouts per group, one actor `a`, and a step that takes the trainer 2 units. How
long a group takes the engine is said per trace. A line of a trace is one event; the order within one unit is that of
testing/scripted_run.py: commit, arrivals, trainer, actor. Comments do the arithmetic of the table in
ledger/schedules.py; "out" is what is outstanding, leased + ready + reserved.
"""

from collections.abc import Sequence
from hashlib import blake2b

from pipelinerl_core.config import RunConfig
from pipelinerl_core.models.resolve import build_config
from tests.scripted_run import Script, ScriptedRun


def config(*, slots: int, steps: int, seed: int = 0, **schedule: object) -> RunConfig:
    return build_config(
        {
            "seed": seed,
            "rollouts": {"group_size": 2, "filter_zero_variance": True},
            "engine": {"concurrency": 2 * slots},
            "schedule": schedule,
            "trainer": {"groups_per_step": 2, "steps": steps},
        }
    )


def trace(
    config: RunConfig, group_units: Sequence[int], *, filtered: Sequence[int] = (), failed: Sequence[int] = ()
) -> list[str]:
    """group_units: engine time of each group; those that no trace sees the end of may be left out."""

    def rewards(group_id: int) -> tuple[float, ...]:
        if group_id in failed:
            return ()
        return (1.0, 1.0) if group_id in filtered else (0.0, 1.0)

    script = Script(
        group_units=lambda group_id: group_units[group_id] if group_id < len(group_units) else 99,
        step_units=lambda step: 2,
        rewards=rewards,
    )
    run = ScriptedRun(config, script)
    run.join("a")
    assert run.run(max_units=60)
    return run.log


def shuffled(group_ids: Sequence[int], prefix: str) -> list[int]:
    return sorted(group_ids, key=lambda group_id: blake2b(f"{prefix}{group_id}".encode(), digest_size=8).digest())


def test_pipeline_leases_while_the_window_has_a_place_and_swaps_in_the_middle_of_groups():
    # W = (max_lag + 1) * N = 4. Three slots, so the actor wants what it lacks of three groups.
    events = trace(
        config(slots=3, steps=3, kind="pipeline", max_lag=1), [2, 3, 6, 2, 2, 3, 2, 2], filtered=[4]
    )  # fmt: skip
    assert events == [
        "t=0 lease 0,1,2 -> a v0",  # three of the four places
        "t=2 ready 0",
        "t=2 lease 3 -> a v0",  # out: 1, 2 leased, 0 ready; the fourth place
        "t=3 ready 1",
        "t=3 step 1 trains 0,1",  # N ready; 0 and 1 stay outstanding, so slot three stands empty: W is full
        "t=4 ready 3",  # out: 2 leased, 3 ready, 0, 1 reserved
        "t=5 commit 1 v1",  # 0 and 1 leave. a does not know version 1: W - out 2 - 1 unseen step * N = 0 for it
        "t=5 swap a v1 (1 running)",  # in the middle of 2, which goes on
        "t=5 lease 4,5 -> a v1",  # now W - out 2 = 2
        "t=6 ready 2",  # sampled for 5 units under version 0, for 1 under version 1
        "t=6 step 2 trains 2,3",  # the surplus of step 1
        "t=7 filtered 4",  # leaves at once ...
        "t=7 lease 6 -> a v1",  # ... and frees its place: out 5 leased, 2, 3 reserved
        "t=8 commit 2 v2",
        "t=8 ready 5",  # one ready: no step 3 yet
        "t=8 swap a v2 (1 running)",
        "t=8 lease 7,8 -> a v2",  # W - out (6 leased, 5 ready) = 2
        "t=9 ready 6",
        "t=9 step 3 trains 5,6",
        "t=10 ready 7",
        "t=11 commit 3 v3",
    ]


def test_conventional_fills_a_phase_then_takes_its_steps_and_announces_at_its_end():
    # S = 2 steps a phase, so 4 groups a phase. Three slots.
    rules = config(slots=3, steps=4, seed=4, kind="conventional", steps_per_phase=2, max_lag=1)

    # A phase is split by a shuffle: the order of blake2b of "<seed>/<last step of the phase>/<group_id>".
    assert shuffled([0, 1, 3, 4], "4/2/") == [3, 0, 4, 1]  # step 1 trains 0 and 3, step 2 trains 1 and 4
    assert shuffled([5, 6, 7, 8], "4/4/") == [8, 7, 5, 6]  # step 3 trains 7 and 8, step 4 trains 5 and 6

    assert trace(rules, [2, 4, 3, 2, 1, 1, 1, 2, 1], failed=[2]) == [
        "t=0 lease 0,1,2 -> a v0",
        "t=2 ready 0",
        "t=2 lease 3 -> a v0",  # the phase lacks one: 4 - out (1, 2 leased, 0 ready)
        "t=3 failed 2",  # the phase lacks one again
        "t=3 lease 4 -> a v0",  # a slot is free, and out is 1, 3 leased, 0 ready
        "t=4 ready 1",
        "t=4 ready 3",
        "t=4 ready 4",
        "t=4 step 1 trains 0,3",  # S * N are ready
        "t=6 commit 1",  # not the end of the phase: nothing is announced, and a, idle, gets no lease
        "t=6 step 2 trains 1,4",  # what is left of the phase, trained at lag 1
        "t=8 commit 2 v2",
        "t=8 swap a v2 (0 running)",
        "t=8 lease 5,6,7 -> a v2",  # only now, with the weights of the phase
        "t=9 ready 5",
        "t=9 ready 6",
        "t=9 lease 8 -> a v2",  # 4 - out (7 leased, 5, 6 ready)
        "t=10 ready 7",
        "t=10 ready 8",
        "t=10 step 3 trains 7,8",
        "t=12 commit 3",
        "t=12 step 4 trains 5,6",
        "t=14 commit 4 v4",
    ]


def test_april_pauses_at_n_and_goes_on_after_the_update_with_the_unfinished_groups():
    # alpha * N = 4 groups after each announcement, all of them in slots.
    assert trace(config(slots=4, steps=3, kind="april", alpha=2, max_lag=1), [2, 3, 6, 5, 1, 4]) == [
        "t=0 lease 0,1,2,3 -> a v0",
        "t=2 ready 0",  # no new lease: 1, 2, 3 leased and 0 ready are alpha * N
        "t=3 ready 1",
        "t=3 step 1 trains 0,1",  # N ready
        "t=3 pause a 2,3",  # 2 has had 3 of 6 units, 3 has had 3 of 5
        "t=5 commit 1 v1",
        "t=5 swap a v1 (2 running)",  # under the pause
        "t=5 continue a 2,3 v1",
        "t=5 lease 4,5 -> a v1",  # 4 - out (2, 3 leased)
        "t=6 ready 4",
        "t=7 ready 3",  # 3 units of version 0, 2 of version 1
        "t=7 step 2 trains 3,4",
        "t=7 pause a 2,5",  # 2 has had 5 of 6 units, 5 has had 2 of 4
        "t=9 commit 2 v2",
        "t=9 swap a v2 (2 running)",
        "t=9 continue a 2,5 v2",
        "t=9 lease 6,7 -> a v2",
        "t=10 ready 2",  # 3 units of version 0, 2 of version 1, 1 of version 2; never aborted
        "t=11 ready 5",
        "t=11 step 3 trains 2,5",
        "t=11 pause a 6,7",
        "t=13 commit 3 v3, 6 tokens masked",  # version 0 at step 3 has lag 2 > 1: 3 units of the 2 rollouts of 2
    ]


def test_april_rounds_alpha_n_up_and_replaces_groups_that_do_not_stay():
    # alpha * N = 1.3 * 2 = 2.6, hence 3 groups; three slots.
    assert trace(config(slots=3, steps=2, kind="april", alpha=1.3, max_lag=1), [1, 3, 4, 1, 1], filtered=[0]) == [
        "t=0 lease 0,1,2 -> a v0",
        "t=1 filtered 0",
        "t=1 lease 3 -> a v0",  # 3 - out (1, 2 leased)
        "t=2 ready 3",
        "t=3 ready 1",
        "t=3 step 1 trains 1,3",
        "t=3 pause a 2",
        "t=5 commit 1 v1",
        "t=5 swap a v1 (1 running)",
        "t=5 continue a 2 v1",
        "t=5 lease 4,5 -> a v1",  # 3 - out (2 leased)
        "t=6 ready 2",
        "t=6 ready 4",  # the second of N: nothing has to wait for 5
        "t=6 step 2 trains 2,4",
        "t=6 pause a 5",
        "t=8 commit 2 v2",
    ]


def test_wait_holds_a_step_back_for_a_group_that_would_be_stale_after_the_step():
    # W = 4, four slots. Group 2 takes 7 units; its version 0 is live up to step 0 + 1 + max_lag = 2.
    rules = config(slots=4, steps=2, kind="pipeline", max_lag=1, stale="wait")
    assert trace(rules, [1, 1, 7, 2, 1, 1]) == [
        "t=0 lease 0,1,2,3 -> a v0",
        "t=1 ready 0",
        "t=1 ready 1",
        "t=1 step 1 trains 0,1",  # nobody waits: after step 1 group 2 is still live at step 2
        "t=2 ready 3",
        "t=3 commit 1 v1",
        "t=3 swap a v1 (1 running)",
        "t=3 lease 4,5 -> a v1",  # W - out (2 leased, 3 ready)
        "t=4 ready 4",
        "t=4 ready 5",  # 3, 4, 5 are ready, but step 2 is the last for version 0 of group 2
        "t=4 step 2 waits: 1 leased groups would be stale after this step",
        "t=7 ready 2",
        "t=7 step 2 trains 2,3",  # the earliest deadlines: step 2 for version 0; 4 and 5, of version 1, have step 3
        "t=9 commit 2 v2",  # nothing masked
    ]


def test_wait_goes_on_without_the_group_after_wait_seconds_and_masks_late_tokens():
    rules = config(slots=4, steps=3, kind="pipeline", max_lag=1, stale="wait", wait_seconds=2)
    assert trace(rules, [1, 1, 7, 2, 1, 1]) == [
        "t=0 lease 0,1,2,3 -> a v0",
        "t=1 ready 0",
        "t=1 ready 1",
        "t=1 step 1 trains 0,1",
        "t=2 ready 3",
        "t=3 commit 1 v1",
        "t=3 swap a v1 (1 running)",
        "t=3 lease 4,5 -> a v1",
        "t=4 ready 4",
        "t=4 ready 5",
        "t=4 step 2 waits: 1 leased groups would be stale after this step",
        "t=6 step 2 trains 3,4",  # two seconds are over; out: 2 leased, 5 ready, 3, 4 reserved
        "t=7 ready 2",  # 3 units of version 0, 4 of version 1
        "t=8 commit 2 v2",
        "t=8 step 3 trains 2,5",  # both live up to step 3 by version 1
        "t=8 swap a v2 (0 running)",
        "t=8 lease 6,7 -> a v2",  # W - out (2, 5 reserved)
        "t=10 commit 3 v3, 6 tokens masked",  # 3 units of the 2 rollouts of group 2
    ]


def test_drop_gives_a_group_up_with_its_first_dead_token_and_refills_its_place():
    rules = config(slots=4, steps=3, kind="pipeline", max_lag=1, stale="drop")
    assert trace(rules, [1, 1, 7, 2, 1, 1, 2, 2]) == [
        "t=0 lease 0,1,2,3 -> a v0",
        "t=1 ready 0",
        "t=1 ready 1",
        "t=1 step 1 trains 0,1",
        "t=2 ready 3",
        "t=3 commit 1 v1",
        "t=3 swap a v1 (1 running)",
        "t=3 lease 4,5 -> a v1",
        "t=4 ready 4",
        "t=4 ready 5",
        "t=4 step 2 trains 3,4",  # nobody waits for group 2
        "t=6 commit 2 v2",
        "t=6 swap a v2 (1 running)",
        "t=6 lease 6,7 -> a v2",  # W - out (2 leased, 5 ready)
        "t=7 ready 2",  # 3 units of version 0, 3 of version 1, 1 of version 2
        "t=7 drop 2",  # step 3 is next: version 0 is dead, although versions 1 and 2 are not
        "t=7 lease 8 -> a v2",  # its place: out 6, 7 leased, 5 ready
        "t=8 ready 6",
        "t=8 ready 7",
        "t=8 step 3 trains 5,6",  # deadlines 3, 4, 4
        "t=10 commit 3 v3",
    ]
