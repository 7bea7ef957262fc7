"""Shared by `train` and `resume`: check the configuration, run the flow, print the summary."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from pipelinerl.flows.cli.console import answer, say
from pipelinerl_core.errors import PipelineRLError
from pipelinerl_core.report.document import held_out_name
from pipelinerl_core.report.live_view import spark_marks, sparkline
from pipelinerl_core.report.query.database import check_alarm_query
from pipelinerl_core.run.follow import RunFollower
from pipelinerl_core.run.jobs import Job
from pipelinerl_core.run.locate import root_url, run_url
from pipelinerl_core.run.records import REPORT_HTML_KEY
from pipelinerl_core.storage.object_store import open_store
from pipelinerl_core.supervision.checks import check_all

_NUM_SAMPLES = 3
_SAMPLE_CHARACTERS = 70


def carry_out(job: Job, *, as_json: bool, more: Callable[[str], list[str]] | None = None) -> None:
    """Check a job, run the train flow and print the report; invalid input is refused before Prefect is imported.

    more: the lines after the summary, from the URL of the run.
    """
    if job.config.placement.kind == "work_pools":  # before the download of a model
        from pipelinerl.flows.cli.launch import check_server

        check_server(job.config)
    if job.run is None:
        check_alarm_query(job.config)
    for line in check_all(job.config, root_url(job.root), run=job.run):
        say(line)
    from pipelinerl.flows.cli.launch import run_training

    report = run_training(job)
    if "wall_seconds" in report:
        lines = summary(report, report_location(report["run_id"], job.root))
    else:
        lines = [f"{report['run_id']}: {report['steps']} steps; no report, see the log"]
    if more is not None:
        try:
            lines += more(run_url(job.root, report["run_id"]))
        except PipelineRLError as error:  # the run has ended well
            lines.append(f"  {error}")
    answer(report, lines, as_json=as_json)


def examples(url: str) -> list[str]:
    """The curve of the reward, and held-out completions of the first and the last version beside their references."""
    follower = RunFollower(open_store(url))
    follower.refresh()
    metrics = [commit.metrics for commit in follower.commits.values()]
    rewards = [of_step["reward/mean"] for of_step in metrics if "reward/mean" in of_step]
    lines = []
    if rewards:
        low, high = min(rewards), max(rewards)
        shares = [(reward - low) / ((high - low) or 1.0) for reward in rewards]
        curve = sparkline(shares, spark_marks(sys.stdout.encoding))
        lines.append(f"  reward by step     {rewards[0]:.3f} {curve} {rewards[-1]:.3f}")
    evals = follower.evals
    for version in sorted({min(evals), max(evals)}) if evals else ():
        lines.append(f"  completions of version {version}:")
        for sample in evals[version].samples[:_NUM_SAMPLES]:
            reference = f"; reference {_short(sample['reference'])}" if sample["reference"] else ""
            reward = "   -" if sample["reward"] is None else f"{sample['reward']:.2f}"
            asked = _short(sample["prompt"][-_SAMPLE_CHARACTERS:])
            lines.append(f"    {reward}  {asked} -> {_short(sample['completion'])}{reference}")
    return lines


def _short(text: str) -> str:
    return repr(text if len(text) <= _SAMPLE_CHARACTERS else f"{text[:_SAMPLE_CHARACTERS]}...")


def report_location(run_id: str, root: str) -> str:
    """Path or URL of the report of a run."""
    return f"{run_url(root, run_id).removeprefix('file://')}/{REPORT_HTML_KEY}"


def _nothing_learned(report: Mapping[str, Any]) -> list[str]:
    """First lines of the summary if all rewards were equal: the sentence, and a completion beside its reference."""
    first, _, comparison = report["warning"].partition(". ")
    example = report["equal_reward_example"] or {}
    return [f"  {first}.", f"    {comparison}", *(f"    {name:<10}  {text!r}" for name, text in example.items())]


def _rewards(report: Mapping[str, Any]) -> list[str]:
    """The held-out and the training reward before and after, each with the components of a reward function."""
    held_out = f"  {held_out_name(report)}"
    means = [(held_out, {"first": report["eval_first"], "last": report["eval_last"]})]
    means += [(f"    {name}", mean) for name, mean in report["eval_components"].items()]
    means += [("  training reward", {"first": report["reward_first"], "last": report["reward_last"]})]
    means += [(f"    {name}", mean) for name, mean in report["reward_components"].items()]
    low, high = report["eval_last_low"], report["eval_last_high"]
    intervals = {held_out: "" if low is None else f" (95 % interval {low:.3f} to {high:.3f})"}
    return [
        f"{name:<20} {mean['first']:.3f} -> {mean['last']:.3f}{intervals.get(name, '')}"
        for name, mean in means
        if mean["first"] is not None and mean["last"] is not None
    ]


def summary(report: Mapping[str, Any], location: str) -> list[str]:
    """The summary of a run as text: accuracy before and after, key figures, location of the report."""
    parts = [f"{name} {seconds:.0f} s" for name, seconds in report["seconds"].items() if seconds >= 1]
    lines = [f"{report['run_id']}: {report['steps']} steps in {report['wall_seconds']:.0f} s ({', '.join(parts)})"]
    if report["equal_reward"] is not None:
        lines += _nothing_learned(report)
    elif report["warning"]:
        lines.append(f"  {report['warning']}")
    if report["emulation"] is not None:
        lines.append(f"  {report['emulation']['note']}")
    lines += _rewards(report)
    if report["lag"]["mean"] is not None:
        lines.append(f"  lag of tokens      mean {report['lag']['mean']:.2f}, max {report['lag']['max']} steps")
    if report["swap_pause_seconds"]["p50"] is not None:
        pause = report["swap_pause_seconds"]
        swaps = f"{report['num_swaps']} swap{'s' * (report['num_swaps'] != 1)}"
        lines.append(f"  {swaps:<17}  p50 {pause['p50'] * 1e3:.1f} ms, max {pause['max'] * 1e3:.1f} ms")
    if bottleneck := (report["advice"] or "").removeprefix(report["warning"] or "").strip():
        lines.append(f"  bottleneck         {bottleneck}")
    lines += [f"  diagnosis          {finding['text']}" for finding in report["findings"]]
    if report["mlflow"] is not None:
        lines.append(f"  MLflow             {report['mlflow']}")
    lines.append(f"  report             {location}")
    return lines
