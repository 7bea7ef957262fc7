"""wandb, as a module that counts what it gets."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

from pipelinerl_core.telemetry.wandb import WandbTracker
from pipelinerl_core.types import NO_STEP


def test_a_resume_logs_no_step_and_no_evaluation_again(tmp_path, monkeypatch):
    points = []
    run = SimpleNamespace(
        offline=True, url=None, summary={}, log=points.append, define_metric=lambda *_, **__: None,
        finish=lambda exit_code: None,
    )  # fmt: skip
    module = ModuleType("wandb")
    module.__spec__ = ModuleSpec("wandb", None)
    module.Settings, module.init = dict, lambda **_: run
    monkeypatch.setitem(sys.modules, "wandb", module)
    nothing = lambda *_, **__: None  # noqa: E731
    inner = SimpleNamespace(logged=NO_STEP, room=100, page=None, log=nothing, close=nothing, start_over=nothing)

    def start(steps, versions, at=5.0):
        points.clear()
        tracker = WandbTracker(
            inner, "r", "p", directory=tmp_path, tags={}, config={}, has_inner=True, is_required=True
        )
        for step in steps:
            tracker.log(step, {"reward/mean": 0.5}, at=1.0, weights_digest=f"d{step}")
        for version in versions:
            tracker.log(version, {"eval/accuracy": 0.5}, at=at)
        tracker.close()
        return [point["step"] for point in points]

    assert start([0, 1, 2], [0, 2]) == [0, 1, 2, 0, 2]
    assert start([2, 3], [0, 2, 3]) == [3, 3]
    assert start([], [3], at=9.0) == [3]  # the version was evaluated again
