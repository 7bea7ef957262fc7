"""Whatever the latencies, failures and comings and goings: no bound is exceeded, nothing is lost, nothing starves.

Histories of whole runs under every schedule and stale policy, drawn by hypothesis and driven through the real ledger
by testing/scripted_run.py. Lists of the history are read round and round.
"""

import math
from collections import Counter
from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import given, settings

from pipelinerl_core.config import RunConfig
from pipelinerl_core.models.resolve import build_config
from tests.scripted_run import Script, ScriptedRun

ACTORS = ("a", "b", "c")
LEASE_SECONDS = 12
STEPS = 6
SCORED, EQUAL, FAILED, PARTLY_SCORED = (0.0, 1.0, 1.0), (1.0, 1.0, 1.0), (1.0,), (0.0, 1.0)
# Far beyond what a run of 6 steps takes if it never waits for nothing: a step is due within a few groups' time.
MAX_UNITS = 3000


@dataclass(frozen=True)
class History:
    schedule: dict[str, object]
    num: int
    """Groups per step."""
    slots: int
    group_units: list[int]
    step_units: list[int]
    commit_units: list[int]
    swap_units: list[int]
    send_units: list[int]
    rewards: list[tuple[float, ...]]
    events: list[tuple[int, str, str]]
    """(units since the event before, what happens, to whom)."""

    def config(self) -> RunConfig:
        return build_config(
            {
                "seed": 3,
                "rollouts": {"group_size": 3, "filter_zero_variance": True},
                "engine": {"concurrency": 3 * self.slots},
                "schedule": self.schedule,
                "trainer": {"groups_per_step": self.num, "steps": STEPS},
                "placement": {"lease_seconds": LEASE_SECONDS},
            }
        )

    def script(self) -> Script:
        return Script(
            group_units=lambda group_id: self.group_units[group_id % len(self.group_units)],
            step_units=lambda step: self.step_units[step % len(self.step_units)],
            commit_units=lambda step: self.commit_units[step % len(self.commit_units)],
            swap_units=lambda actor, version: self.swap_units[(version + ord(actor)) % len(self.swap_units)],
            send_units=lambda group_id: self.send_units[group_id % len(self.send_units)],
            rewards=lambda group_id: self.rewards[group_id % len(self.rewards)],
        )


def units(smallest: int, largest: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(smallest, largest), min_size=1, max_size=7)


@st.composite
def schedules(draw: st.DrawFn) -> dict[str, object]:
    max_lag = draw(st.integers(0, 3))
    kind = draw(st.sampled_from(["pipeline", "conventional", "april"]))
    stale = draw(st.sampled_from(["mask", "drop"] if kind == "april" else ["mask", "drop", "wait"]))
    schedule: dict[str, object] = {"kind": kind, "max_lag": max_lag, "stale": stale}
    if stale == "wait":
        schedule["wait_seconds"] = draw(st.integers(1, 6))
    if kind == "conventional":
        schedule["steps_per_phase"] = draw(st.integers(1, max_lag + 1))
    if kind == "april":
        schedule["alpha"] = draw(st.sampled_from([1.0, 1.3, 1.5, 2.0, 3.5, 4.0]).filter(lambda a: a <= max_lag + 1))
    return schedule


@st.composite
def histories(draw: st.DrawFn) -> History:
    schedule, num = draw(schedules()), draw(st.integers(1, 4))
    window = (int(str(schedule["max_lag"])) + 1) * num
    rewards = draw(st.lists(st.sampled_from([SCORED, SCORED, EQUAL, FAILED, PARTLY_SCORED]), max_size=5))
    events = st.tuples(
        st.integers(0, 9),
        st.sampled_from(["join", "leave", "die", "restart", "silence", "trainer"]),
        st.sampled_from(ACTORS),
    )
    return History(
        schedule=schedule,
        num=num,
        slots=draw(st.integers(1, window)),
        group_units=draw(units(1, 14)),
        step_units=draw(units(1, 8)),
        commit_units=draw(units(0, 3)),
        swap_units=draw(units(0, 9)),
        send_units=draw(units(0, 3)),
        rewards=[SCORED, *rewards],
        events=draw(st.lists(events, max_size=12)),
    )


class Inspector:
    """Looks at a run after every event."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.frontier = 0

    def __call__(self, run: ScriptedRun) -> None:
        self.check_bound(run)
        self.check_tokens(run)
        self.check_order(run)
        self.check_patience(run)

    def check_bound(self, run: ScriptedRun) -> None:
        """Never more outstanding than the schedule admits."""
        rules, num, counts = self.config.schedule, self.config.trainer.groups_per_step, run.ledger.counts
        if rules.kind == "pipeline":
            assert counts.outstanding <= (rules.max_lag + 1) * num
        elif rules.kind == "april":
            assert counts.outstanding <= math.ceil(rules.alpha * num)
        elif not run.ledger.is_done:
            phase = counts.committed_step // rules.steps_per_phase
            last = min((phase + 1) * rules.steps_per_phase, STEPS)
            assert counts.outstanding <= (last - counts.committed_step) * num

    def check_tokens(self, run: ScriptedRun) -> None:
        """generated = the sum of all other classes."""
        tokens = run.ledger.tokens()
        assert tokens["generated"] == sum(number for name, number in tokens.items() if name != "generated")
        assert min(tokens.values()) >= 0

    def check_order(self, run: ScriptedRun) -> None:
        """Groups that lost their lease go before new prompts."""
        if run.ledger.next_group_id > self.frontier:
            self.frontier = run.ledger.next_group_id
            assert run.ledger.num_queued == 0

    def check_patience(self, run: ScriptedRun) -> None:
        """A ready group waits for at most max_lag + 1 steps; then its newest token is too old, and it is dropped."""
        reserved = {group_id for step in range(STEPS + 1) for group_id, _ in run.ledger.reserved(step)}
        for group_id, first in run.ready_since.items():
            passed_over = run.next_step - first
            assert group_id in reserved or passed_over <= self.config.schedule.max_lag + 1, group_id


def play(history: History) -> ScriptedRun:
    """The whole run; after the last event every actor is there again."""
    config = history.config()
    run = ScriptedRun(config, history.script(), on_change=Inspector(config))
    run.join("a")
    for pause, event, who in history.events:
        run.run(pause)
        if run.ledger.is_done:
            return run
        happen(run, event, who)
    for name in ACTORS:
        if name not in run.actors:
            run.join(name)
    assert run.run(MAX_UNITS), ["the run stalls", history, *run.log[-30:]]
    return run


def happen(run: ScriptedRun, event: str, who: str) -> None:
    if event == "trainer":
        run.restart_trainer()
    elif who not in run.actors:
        run.join(who)
    elif event == "leave":
        run.leave(who)
    elif event == "die":
        run.die(who)
    elif event == "restart":
        run.die(who)
        run.join(who)
    elif event == "silence":
        run.silence(who, 2 * LEASE_SECONDS)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(histories())
def test_every_history_keeps_the_bounds_and_reaches_its_last_step(history):
    run = play(history)
    check_fates(run)
    check_trained_tokens(run, history)


def check_fates(run: ScriptedRun) -> None:
    """Every leased prompt has exactly one fate, or is still open; the commits say the same."""
    fates = dict(run.fates)
    assert len(fates) == len(run.fates)
    for group_id in range(run.ledger.next_group_id):
        assert (group_id in fates) != run.ledger.is_open(group_id), group_id
    told = [(record.group_id, record.fate) for record in run.recorded_fates]
    trained = [(group_id, "trained") for group_id, fate in run.fates if fate == "trained"]
    assert len(told) == len(set(told))
    assert set(told + trained) <= set(run.fates)
    per_step = Counter(step for step, _ in run.trained)
    assert per_step == dict.fromkeys(range(1, STEPS + 1), len(trained) // STEPS)


def check_trained_tokens(run: ScriptedRun, history: History) -> None:
    """Worked out again from the groups: nothing older than max_lag was trained, and under drop nothing was masked."""
    max_lag = int(str(history.schedule["max_lag"]))
    lags = Counter[int]()
    for step, group in run.trained:
        for version, number in group.tokens_by_version.items():
            assert version <= step - 1
            lags[step - 1 - version] += number
    tokens = run.ledger.tokens()
    assert tokens["trained"] == sum(number for lag, number in lags.items() if lag <= max_lag)
    assert tokens["masked_stale"] == sum(number for lag, number in lags.items() if lag > max_lag)
    if history.schedule["stale"] == "drop":
        assert max(lags) <= max_lag
