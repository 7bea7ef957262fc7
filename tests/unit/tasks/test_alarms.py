"""When people are woken."""

from types import SimpleNamespace

import pytest

from pipelinerl.tasks import alarms
from pipelinerl.tasks.alarms import RUN_STALLED, WINDOW_STEPS, Alarms, reward_fall
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.report.query.database import check_alarm_query
from pipelinerl_core.report.query.views import VIEWS
from tests.synthetic_run import Shape, write_run

RISE = [0.2 + 0.002 * step for step in range(150)]  # from 0.2 to 0.5


def commits(rewards):
    return {0: SimpleNamespace(metrics={}, rescored={})} | {
        step: SimpleNamespace(metrics={"reward/mean": reward}, rescored={}) for step, reward in enumerate(rewards, 1)
    }


@pytest.fixture
def events(monkeypatch):
    emitted = []
    monkeypatch.setattr(alarms, "emit_event", lambda **event: emitted.append(event))
    return emitted


@pytest.mark.parametrize(
    "rewards",
    [
        [],
        RISE,
        [0.3] * 200,
        [0.25 + 0.05 * (step % 2) for step in range(200)],
        RISE + [0.35] * WINDOW_STEPS,  # half of what was gained
        RISE[:30] + [0.0] * 5,  # too few steps to say
    ],
    ids=["none", "rise", "flat", "noise", "setback", "short"],
)
def test_learning_noise_and_setbacks_are_no_collapse(rewards):
    assert reward_fall(rewards) is None


def test_a_reward_below_its_start_has_collapsed():
    best, newest = reward_fall(RISE + [0.05] * WINDOW_STEPS)
    assert best == pytest.approx(sum(RISE[-WINDOW_STEPS:]) / WINDOW_STEPS)
    assert newest == pytest.approx(0.05)
    assert reward_fall([100 * reward for reward in RISE] + [5.0] * WINDOW_STEPS) is not None, "at any scale"


def test_each_alarm_is_emitted_once_and_names_the_run(events):
    run_alarms = Alarms("quickstart-12345678")
    run_alarms.check(commits(RISE))
    assert events == []
    for _ in range(2):
        run_alarms.check(commits(RISE + [0.0] * WINDOW_STEPS))
        run_alarms.emit(RUN_STALLED, "no commit for 20 minutes")
    assert [event["event"] for event in events] == ["pipelinerl.reward.collapsed", "pipelinerl.run.stalled"]
    assert {event["resource"]["prefect.resource.id"] for event in events} == {"pipelinerl.run.quickstart-12345678"}
    assert events[0]["payload"]["message"] == "mean reward of the last 20 steps: 0.000; best mean: 0.479"


def test_each_actor_under_alarm_is_named_once(events):
    run_alarms = Alarms("quickstart-12345678")
    step_commits = commits([0.5] * 4)
    for step, actors in {1: {"a/1": ""}, 2: {"a/1": "mean 0.2"}, 3: {"a/1": "mean 0.3", "b/1": "mean 0.4"}}.items():
        step_commits[step].rescored = {name: SimpleNamespace(alarm=alarm) for name, alarm in actors.items()}
        run_alarms.check({number: step_commits[number] for number in range(step + 1)})
    run_alarms.check(step_commits)
    assert [event["event"] for event in events] == ["pipelinerl.actor.mismatch"] * 2
    assert [event["payload"]["message"].split()[0] for event in events] == ["a/1", "b/1"]
    assert events[0]["payload"]["message"].endswith("mean 0.2")


def test_a_part_of_a_mixture_without_a_trained_group_is_named_once(events):
    run_alarms = Alarms("mixed-12345678")
    config = {"mixture": {"math": {"weight": 1.0}, "guess": {"weight": 1.0}}}
    for num in (7, 8, 9):
        metrics = {"part/math/groups_trained": 8.0, "part/guess/groups_failed": float(num)}
        run_alarms.check_parts(config, SimpleNamespace(metrics=metrics))
    assert [event["event"] for event in events] == ["pipelinerl.part.failed"]
    assert events[0]["payload"]["message"].startswith("mixture.guess: all 8 groups failed")
    Alarms("plain").check_parts({"seed": 0}, None)


def test_a_row_of_the_users_query_is_told_once_with_its_values(events, store):
    write_run(store, Shape(steps=5))
    run_alarms = Alarms("synthetic")
    run_alarms.check_query(store, "")
    run_alarms.check_query(store, "select step from steps where step > 5")
    assert events == []
    run_alarms.check_query(store, "select step from steps where step > 2")  # within the pause
    assert events == []
    for _ in range(2):
        run_alarms = run_alarms if events else Alarms("synthetic")
        run_alarms.check_query(store, "select step, reward as mean from (select 3 as step, 0.5 as reward)")
    assert [(event["event"], event["payload"]["message"]) for event in events] == [
        ("pipelinerl.query.answered", "step: 3, mean: 0.5")
    ]


def test_a_wrong_query_is_an_error_with_the_same_pause(store):
    write_run(store, Shape(steps=5))
    run_alarms = Alarms("synthetic")
    with pytest.raises(ConfigError, match="SQL: "):
        run_alarms.check_query(store, "select nothing from steps")
    run_alarms.check_query(store, "select nothing from steps")  # within the pause


def check(statement):
    config = load_config("quickstart")
    tracking = config.tracking.model_copy(update={"alarm_query": statement})
    check_alarm_query(config.model_copy(update={"tracking": tracking}))


WRONG = ["selec 1", "select 1; select 2", " ", "-- nothing", "select nothing from steps", "select step from stepz"]


@pytest.mark.parametrize("statement", [*WRONG, "select sum(prompt) from rollouts", "drop table steps"])
def test_a_text_that_is_no_query_of_a_run_is_refused_before_the_start(statement):
    with pytest.raises(ConfigError, match=r"^tracking.alarm_query: SQL: [^\n]+$"):
        check(statement)


def test_a_query_of_every_view_is_accepted_before_the_start():
    for statement in ("", "select 1 ;\n", "select step, step from steps -- twice", "from steps where step > 3"):
        check(statement)
    for name, view in VIEWS.items():
        columns = ", ".join(f'"{column}"' for column in view.columns)
        check(f"with own as (select {columns} from {name}) select * from own order by 1 limit 3")


def test_what_an_earlier_start_has_told_is_not_told_again(events):
    fallen = commits(RISE + [0.0] * WINDOW_STEPS)
    Alarms("r").check(fallen)
    assert len(events) == 1
    resumed = Alarms("r")
    resumed.skip({"seed": 0}, fallen, None)
    resumed.check(fallen)
    assert len(events) == 1
    resumed.emit(RUN_STALLED, "no step")
    assert len(events) == 2
