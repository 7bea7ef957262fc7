"""The recorder of a reference trainer: measured time, stored weights, and the end of the run."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.peers import record
from benchmarks.peers.record import MARGIN, Recorder, read_points
from pipelinerl_core.models.resolve import load_config


class Clock:
    """A clock that only the test and the saving of weights advance."""

    def __init__(self):
        self.now = 50.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(record, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    real = record.save_file

    def slow(weights, path):
        clock.now += 100.0
        real(weights, path)

    monkeypatch.setattr(record, "save_file", slow)
    return clock


def recorder(out, steps=100, **changes):
    config = load_config("quickstart", ["seed=3", f"trainer.steps={steps}"])
    options = {"every": 5, "target": 0.5, "max_seconds": 1000.0, "settings": {"rows": 8}, **changes}
    return Recorder("a-peer", config, out, **options)


def run(recording, clock, rewards):
    """Take steps of 2 s with these rewards; returns the step at which the recorder stopped, None if it did not."""
    model = torch.nn.Linear(2, 1)
    recording.start(model)
    for number, reward in enumerate(rewards, start=1):
        clock.now += 2.0
        with torch.no_grad():
            model.bias.fill_(float(number))
        if recording.after_step(model, reward):
            return number
    return None


def test_the_time_of_saving_is_not_counted_and_every_fifth_step_is_stored(tmp_path, clock):
    assert run(recorder(tmp_path, steps=12), clock, [0.25] * 12) == 12
    document = read_points(tmp_path)
    assert (document["name"], document["seed"], document["settings"]) == ("a-peer", 3, {"rows": 8})
    assert document["config"]["trainer"]["steps"] == 12
    points = [(point["step"], point["seconds"], point["samples"], point["reward"]) for point in document["points"]]
    assert points == [(0, 0.0, 0, None), (5, 10.0, 2560, 0.25), (10, 20.0, 5120, 0.25), (12, 24.0, 6144, 0.25)]
    assert document["step_seconds"] == [2.0] * 12
    for step in (5, 10, 12):
        assert load_file(tmp_path / f"{step:06}.safetensors")["bias"].item() == step


def test_the_run_stops_when_the_mean_reward_of_ten_steps_exceeds_the_target_by_the_margin(tmp_path, clock):
    level = 0.5 + MARGIN
    # The first seven rewards are 0: only from step 17 on, all ten steps of the window are above the level.
    assert run(recorder(tmp_path), clock, [0.0] * 7 + [level + 0.001] * 20) == 17
    assert read_points(tmp_path)["points"][-1]["step"] == 17
    assert run(recorder(tmp_path / "never"), clock, [level - 0.01] * 30) is None


def test_the_run_stops_at_the_time_limit(tmp_path, clock):
    assert run(recorder(tmp_path, max_seconds=7.0), clock, [0.1] * 20) == 4
