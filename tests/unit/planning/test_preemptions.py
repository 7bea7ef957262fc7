"""Traces of preemptions, the capacity that they leave, and the goodput of a run with preemptions."""

from itertools import pairwise

import pytest

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.planning.prediction import Prediction
from pipelinerl_core.planning.preemptions import goodput, predict_goodput, read_trace
from pipelinerl_core.planning.simulator import Preemption
from pipelinerl_core.planning.what_if import source_of
from tests.builders import small_config

HEADER = "seconds,role,away_seconds,notice_seconds\n"
CONFIG = small_config(placement={"actors": 2})


def written(path, rows):
    (path / "trace.csv").write_text(HEADER + rows)
    return str(path / "trace.csv")


def test_a_file_is_read(tmp_path):
    trace = read_trace(written(tmp_path, "60,trainer,30,0\n5,actor-1,20,120\n"), CONFIG, 0.0)
    assert trace == [Preemption(60.0, "trainer", 30.0), Preemption(5.0, "actor-1", 20.0, 120.0)]


@pytest.mark.parametrize(
    "row", ["5,actor-2,20,0", "-1,hub,20,0", "5,hub,inf,0", "5,hub,,0", "5,hub,1", "x,hub,1,0", "1.5,hub,1,0"]
)
def test_a_wrong_row_is_refused_in_one_line(tmp_path, row):
    with pytest.raises(ConfigError, match=r"--preemptions .*trace\.csv"):
        read_trace(written(tmp_path, f"1,hub,1,0\n{row}\n"), CONFIG, 0.0)
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(str(tmp_path / "none.csv"), CONFIG, 0.0)


def test_a_made_trace_has_the_rates_and_no_role_ends_while_it_is_away():
    trace = read_trace("actors=100,hub=500,away=20,notice=5", CONFIG, 100_000)
    assert {event.role for event in trace} == {"actor-0", "actor-1", "hub"}
    own = [event.seconds for event in trace if event.role == "actor-0"]
    assert len(own) == pytest.approx(100_000 / 120, rel=0.1)
    assert min(b - a for a, b in pairwise(own)) >= 20
    assert trace == read_trace("actors=100,hub=500,away=20,notice=5", CONFIG, 100_000)


@pytest.mark.parametrize(
    "rates", ["away=5", "actors=0", "actors=x", "evaluator=5", "actors=5,away=-1", "actors=nan", "actor=9e9"]
)
def test_wrong_rates_are_refused(rates):
    with pytest.raises(ConfigError, match="rates above 0"):
        read_trace(rates, CONFIG, 100)


def test_the_goodput_is_the_rate_over_what_the_capacity_allows():
    """11 steps in 12 s; actor-0 of 2 is away for 3 of the 10 s after step 1, the trainer for 2."""
    trace = [Preemption(1.0, "actor-0", 4.0), Preemption(10.0, "trainer", 3.0), Preemption(13.0, "actor-1", 5.0)]
    steps = [1.0 + number for number in range(12)]
    for bottleneck, idle, busy, share in (
        ("generation", 0.2, 1.0, 0.85),
        ("generation", 0.0, 1.0, 0.8),  # the trainer has no idle time to make up for its end
        ("training", 0.0, 0.9, 0.8),
        ("staleness limit", 0.0, 1.0, 0.8),
    ):
        alone = Prediction(
            steps_per_second=1.25, mean_lag=1.0, trainer_idle=idle, busy_slots=busy, bottleneck=bottleneck
        )
        result = goodput(steps, trace, CONFIG, alone)
        assert result["actors_there"] == pytest.approx(0.85)
        assert result["trainer_there"] == pytest.approx(0.8)
        assert result["possible_steps_per_second"] == pytest.approx(1.25 * share)
        assert result["goodput"] == pytest.approx(1.0 / (1.25 * share))
    assert [result[f"{role}_preemptions"] for role in ("actor", "trainer", "hub")] == [0, 1, 0]
    with pytest.raises(ConfigError, match="too few"):
        goodput(steps[:3], trace, CONFIG, alone)


def test_the_time_in_which_a_role_starts_lowers_the_goodput(tmp_path):
    emulation = {"accelerators": 4, "generators": 2, "token_seconds": 1e-3, "train_token_seconds": 0.1}
    config = small_config(trainer={"steps": 12}, emulation=emulation)
    source = source_of(config)
    none = predict_goodput(source, config, written(tmp_path, ""), 1.0)
    assert none["goodput"] == pytest.approx(1.0, abs=0.05)
    late = predict_goodput(source, config, written(tmp_path, "300,trainer,0,0\n"), 50.0)
    assert late["goodput"] < 0.95 * none["goodput"]
    assert late["trainer_there"] == 1.0
    assert late["trainer_preemptions"] == 1
    assert predict_goodput(source, config, "actors=200,away=50", 1.0)["actors_there"] < 1
