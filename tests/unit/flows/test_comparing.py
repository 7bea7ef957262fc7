"""Tests of what `compare` and `bench learning` print before the first run."""

from pipelinerl.flows.cli import comparing, launch
from pipelinerl_core.comparison.plan import Wanted, plan_comparison
from pipelinerl_core.config.arm import parse_arm
from pipelinerl_core.supervision import checks


def test_the_warning_about_the_disk_counts_every_run_that_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(comparing, "check_all", lambda config, root: [])
    monkeypatch.setattr(checks, "model_size", lambda path: 1_000_000_000)
    monkeypatch.setattr(checks, "_free", lambda directory: 5_000_000_000)
    monkeypatch.setattr(launch, "run_comparison", lambda plan, root: {"root": root})
    arms = (parse_arm("pipeline: schedule.kind=pipeline"), parse_arm("april: schedule.kind=april"))
    plan = plan_comparison(Wanted(source="quickstart", arms=arms, seeds=(0, 1)))
    assert comparing.carry_out(plan, str(tmp_path)) == {"root": str(tmp_path)}
    printed = capsys.readouterr()
    assert "5.0 GB free, but 4 runs need up to" in printed.out + printed.err
