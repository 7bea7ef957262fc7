"""The live terminal view of `train` (on stderr), and the text and document of `status`."""

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.report.actor_alarms import alarm_text
from pipelinerl_core.report.advice import clipped_advice, refused_advice, unmoved_advice
from pipelinerl_core.report.diagnosis import as_documents, diagnose, text_decoder
from pipelinerl_core.report.equal_rewards import headline, run_equal_reward
from pipelinerl_core.report.facts import newest_facts
from pipelinerl_core.report.scrape_targets import live_roles, role_progress
from pipelinerl_core.run.context import planned_steps
from pipelinerl_core.run.follow import RunFollower, commit_metrics, eval_metrics
from pipelinerl_core.run.hub_status import HEARTBEAT_SECONDS, HubWatch, has_ended, may_be_live
from pipelinerl_core.run.records import Commit, HubRecord
from pipelinerl_core.telemetry.length_bias import length_line, length_report
from pipelinerl_core.telemetry.metrics import short_key
from pipelinerl_core.telemetry.parts import FATES, parts_of, untrained_parts
from pipelinerl_core.types import LengthTotals

# Without a terminal: shortest time between two lines.
_LINE_SECONDS = 5.0
_SAME_STEP_SECONDS = 60.0
# If the heartbeat is unchanged for longer, the hub counts as dead.
_HUB_SILENCE_SECONDS = 10.0
_ASCII = " .:-=+*#%@"
_BLOCKS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_SPARK_WIDTH = 40
_BAR_WIDTH = 40
_ETA_STEPS = 20
_PART_STEPS = 20
_SHOWN = ("reward/mean", "lag/mean", "importance/ess", "rollouts/max_versions")


class LiveView:
    """Shows a live run. A context manager; call `update` after each reading of the run."""

    def __init__(self, console: Console | None, total_steps: int, *, name: str = "") -> None:
        """console: None is stderr. Without a terminal, the view is a plain line every 5 s.

        name: of the run, if this process shows several runs at the same time, in lines that begin with the names.
        """
        self._console = console or Console(stderr=True, force_terminal=False if name else None)
        self._prefix = f"{name}: " if name else ""
        self._total_steps = total_steps
        self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False)
        self._marks = spark_marks(self._console.encoding)
        self._printed_at = float("-inf")
        self._printed = ""
        self._printed_step = 0
        self._newest = ""

    def __enter__(self) -> "LiveView":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._console.is_terminal:
            self._live.stop()
        elif self._newest != self._printed:
            self._print()

    def update(
        self, hub: HubRecord | None, follower: RunFollower, progress: str = "", *, silent_seconds: float = 0.0
    ) -> None:
        """Draw the state of the follower and the hub; does not refresh the follower. Arguments as of `status_of`."""
        status = status_of(follower, hub, progress, silent_seconds=silent_seconds)
        status["steps"] = self._total_steps
        if self._console.is_terminal:
            commits = follower.commits.newest(_SPARK_WIDTH + 1)
            rewards = [commit.metrics["reward/mean"] for commit in commits if "reward/mean" in commit.metrics]
            accuracies = [record.accuracy for record in follower.evals.values() if record.known_accuracy is not None]
            sparklines = sparkline(rewards, self._marks), sparkline(accuracies, self._marks)
            self._live.update(_panel(status, *sparklines), refresh=True)
            return
        self._newest = f"{self._prefix}{status_line(status)}"
        # Within a step little changes but the speed; before the first step, each line tells of progress.
        wait = _LINE_SECONDS if status["step"] != self._printed_step or not status["step"] else _SAME_STEP_SECONDS
        if self._newest != self._printed and time.monotonic() - self._printed_at >= wait:
            self._printed_step = status["step"]
            self._print()

    def _print(self) -> None:
        self._console.print(self._newest, markup=False, highlight=False, soft_wrap=True)
        self._printed, self._printed_at = self._newest, time.monotonic()


def run_status(store: ObjectStore) -> dict[str, Any]:
    """The document of `status --json`. Raises MissingObject if there is no such run."""
    follower = RunFollower(store)
    follower.refresh()
    watch = HubWatch(store)
    hub = watch.find_live()
    silent_seconds = 0.0 if hub is not None else max(HEARTBEAT_SECONDS, _HUB_SILENCE_SECONDS)
    status = status_of(follower, hub or watch.look(), role_progress(store), silent_seconds=silent_seconds)
    if status["hub"]:
        status["hub"]["silent_seconds"] = (
            None  # one look tells whether a hub is live, and not since when it is silent
        )
    decode = text_decoder(follower.run.model_path)
    return {**status, "findings": as_documents(diagnose(newest_facts(follower), decode))}


def format_status(store: ObjectStore, status: Mapping[str, Any]) -> str:
    """The document of `run_status` and the addresses of the live roles as a few lines of text."""
    lines = [f"{status['run_id']}: {status['state']}, {status_line(status)}"]
    if status["ledger"]:
        lines.append("tokens: " + ", ".join(f"{name} {num:,}" for name, num in status["ledger"].items()))
    if status["length_bias"]["classes"]:
        lines.append(f"lengths: {length_line(status['length_bias'])}")
    lines += [f"diagnosis: {finding['text']}" for finding in status["findings"]]
    lines += [f"mixture: {part_line(name, part)}" for name, part in status["parts"].items()]
    for name, actor in status["actors"].items():
        slots = f"{actor['running']} of {actor['concurrency']} slots, {actor['waiting']} waiting"
        lines.append(f"{name}: version {actor['engine_version']}, {slots}")
    if status["hub"]:
        is_live = status["state"] == "running"
        how = "live" if is_live else "has ended" if status["hub"]["ended"] else "silent"
        lines.append(f"hub: {status['hub']['url']}, {how}")
    lines += [f"{role.name}: health and metrics at {role.url}" for role in live_roles(store)]
    return "\n".join(lines)


def status_of(
    follower: RunFollower, hub: HubRecord | None, progress: str = "", *, silent_seconds: float = 0.0
) -> dict[str, Any]:
    """The status from the commits, and, until the last commit, from the hub if its heartbeat is recent.

    On the hub's host, a hub whose process has ended counts as dead at once. progress: see
    `role_progress`. silent_seconds: since when the heartbeat of the hub is unchanged (`HubWatch.silent_seconds`).
    """
    last = follower.last
    steps = planned_steps(follower.store, follower.run)
    metrics = commit_metrics(last, follower.before(last)) if last else {}
    is_alive = may_be_live(hub) and silent_seconds < _HUB_SILENCE_SECONDS
    evals = list(follower.evals.values())
    all_evals = [*evals, *(record for own in follower.set_evals.values() for record in own.values())]
    step = last.step if last else 0
    is_over = bool(last and step >= steps)
    live = hub.live if hub is not None and is_alive and not is_over else {}
    reward = run_equal_reward(follower.commits.values(), follower.run.config, is_over=is_over)
    parts = _parts(follower, metrics)
    alarm = alarm_text([last] if last else [])
    first = alarm or (headline(reward, step, is_over=is_over) if reward is not None else None)
    newest, config = follower.commits.newest(_ETA_STEPS), follower.run.config
    phase = _steps_per_phase(config)
    pauses = [swap.pause_seconds for commit in newest for swap in commit.swaps]
    paced = follower.commits.newest(max(_ETA_STEPS, 3 * phase + 1))
    evaluated = [commit for version in list(follower.evals)[-1:] if (commit := follower.commits.get(version))]
    unmoved = "" if reward is not None else unmoved_advice([*evaluated, *newest], config).rstrip(".")
    measured = (unmoved, clipped_advice(newest, config), refused_advice(newest, config))
    warnings = [*filter(None, (first, *measured)), *untrained_parts(parts).values()]
    return {
        "run_id": follower.run.run_id,
        "state": "finished" if is_over else "running" if is_alive else "stopped",
        "warning": "; ".join(warnings) or None,
        "step": step,
        "steps": steps,
        "metrics": {**metrics, **(eval_metrics(evals[-1]) if evals else {})},
        "newest_version": live.get("newest_version", step if last else None),
        **{short_key(name): metrics.get(name) for name in _SHOWN},
        "eval_first": evals[0].known_accuracy if evals else None,
        "eval_last": evals[-1].known_accuracy if evals else None,
        "eval_version": evals[-1].version if evals else None,
        "eval_prompts": evals[-1].num_prompts if evals else None,
        "num_evaluations": len(evals) + sum(map(len, follower.set_evals.values())),
        "evaluated_at": max((record.finished_at for record in all_evals), default=0.0),
        "parts": parts,
        "progress": progress,
        "swap_pause_seconds": live.get("swap_pause_seconds", statistics.median(pauses) if pauses else None),
        "tokens_per_second": live.get(
            "tokens_per_second", metrics.get("actor/tokens_per_second") if is_alive else None
        ),
        "eta_seconds": _eta(paced, steps, phase) if is_alive else None,
        "ready": live.get("ready"),
        "leased": live.get("leased"),
        "actors": {} if is_over else _actors(live.get("actors"), last),
        "ledger": live.get("tokens") if isinstance(live.get("tokens"), dict) else dict(last.tokens) if last else {},
        "length_bias": length_report(_lengths(live.get("lengths"), last)),
        "hub": {"url": hub.url, "silent_seconds": silent_seconds, "ended": has_ended(hub)} if hub else None,
    }


def _parts(follower: RunFollower, metrics: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """Part of the mixture -> its figures of the newest step (telemetry/parts.py), and its newest held-out accuracy.

    A part without a rollout in the newest step has the reward of the last step that has one.
    """
    parts: dict[str, dict[str, Any]] = dict(parts_of(follower.run.config, metrics))
    recent = follower.commits.newest(_PART_STEPS) if parts else []
    for name, part in parts.items():
        rewards = [commit.metrics[key] for commit in recent if (key := f"part/{name}/reward") in commit.metrics]
        part["reward"] = rewards[-1] if rewards else None
        evals = list(follower.set_evals.get(name, {}).values())
        part["eval_first"] = evals[0].known_accuracy if evals else None
        part["eval_last"] = evals[-1].known_accuracy if evals else None
        part["eval_error"] = evals[-1].error if evals else ""
    return parts


def part_line(name: str, part: Mapping[str, Any]) -> str:
    """Example: math 50 %: reward 0.41, held-out 0.400, groups 120 trained, 3 filtered, 1 failed."""
    groups = ", ".join(
        f"{num:,.0f} {fate}"
        for fate in FATES
        if (num := part.get(f"groups_{fate}")) or (fate == "trained" and num == 0)
    )
    fields = [
        None if part["reward"] is None else f"reward {part['reward']:.3f}",
        None if part["eval_last"] is None else f"held-out {part['eval_last']:.3f}",
        f"groups {groups}" if groups else None,
    ]
    return f"{name} {part['weight']:.0%}: {', '.join(filter(None, fields)) or 'no step yet'}"


def status_line(status: Mapping[str, Any]) -> str:
    """One line. Example: step 12/300  reward 0.41  lag 3.1  9,812 tokens/s  pause 8 ms  ess 0.95  eta 3:41."""
    fields: list[tuple[str, *tuple[Any, ...]]] = [
        ("{};", status["warning"]),
        ("step {}/{}", status["step"], status["steps"]),
        ("reward {:.3f}", status["reward_mean"]),
        ("held-out {:.3f} of {:,} (version {})", *(status[f"eval_{key}"] for key in ("last", "prompts", "version"))),
        ("lag {:.1f}", status["lag_mean"]),
        ("versions {:.0f}", status["max_versions"]),
        ("{:,.0f} tokens/s", status["tokens_per_second"]),
        ("pause {:.1f} ms", _milliseconds(status["swap_pause_seconds"])),
        ("ess {:.3f}", status["ess"]),
        ("eta {}", _clock(status["eta_seconds"])),
        ("{}", status["progress"] or None),
    ]
    return "  ".join(form.format(*values) for form, *values in fields if None not in values)


def spark_marks(encoding: str) -> str:
    """The marks of a sparkline, lowest first, that an encoding has."""
    return _BLOCKS if "utf" in encoding.lower() else _ASCII


def sparkline(values: Sequence[float], marks: str = _ASCII) -> str:
    """The last values, each as one of `marks` from 0 to the largest value (at least 1). Example: [0, 1] -> " @"."""
    shown = list(values)[-_SPARK_WIDTH:]
    top = max([1.0, *shown])
    return "".join(marks[round(min(max(value / top, 0.0), 1.0) * (len(marks) - 1))] for value in shown)


def _panel(status: Mapping[str, Any], reward_history: str, eval_history: str) -> Group:
    head = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=max(1, status["steps"]), completed=status["step"], width=_BAR_WIDTH)
    eta = _clock(status["eta_seconds"])
    head.add_row(f"step {status['step']}/{status['steps']}", bar, f"eta {eta}" if eta else status["state"])
    body = Table.grid(padding=(0, 2))
    reward = f"{status['reward_mean']:.3f}" if status["reward_mean"] is not None else "-"
    body.add_row("reward", Text(reward, style="bold"), Text(reward_history, style="cyan"))
    if status["eval_last"] is None:
        body.add_row("held-out", "-", status["progress"])
    else:
        first = "" if status["eval_first"] is None else f"; before training {status['eval_first']:.3f}"
        origin = f"  version {status['eval_version']}, {status['eval_prompts']:,} prompts{first}"
        body.add_row("held-out", f"{status['eval_last']:.3f}", Text(eval_history, style="cyan") + Text(origin))
    elsewhere = dict.fromkeys(("warning", "reward_mean", "eval_last", "eta_seconds"))
    facts = status_line({**status, **elsewhere}).partition("  ")[2]
    warning = [Text(status["warning"], style="bold red")] if status["warning"] else []
    rows: list[Any] = [*warning, head, body, Text(facts or "waiting for the first step", style="dim")]
    rows += [Text(part_line(name, part)) for name, part in status["parts"].items()]
    for name, actor in status["actors"].items():
        line = Table.grid(padding=(0, 2))
        slots = ProgressBar(total=max(1, actor["concurrency"]), completed=actor["running"], width=_BAR_WIDTH // 2)
        line.add_row(
            name, slots, f"{actor['running']}/{actor['concurrency']} slots", f"version {actor['engine_version']}"
        )
        rows.append(line)
    return Group(*rows)


def _actors(live: Any, last: Commit | None) -> dict[str, dict[str, int]]:
    """Slots of each actor: from the live totals of the hub, else from the last commit."""
    known: dict[str, Mapping[str, Any]] = {}
    if isinstance(live, Mapping):
        known = {str(name): actor for name, actor in live.items() if isinstance(actor, Mapping)}
    elif last:
        known = {name: sample.model_dump() for name, sample in last.actors.items()}
    wanted = ("engine_version", "running", "waiting", "concurrency")
    return {name: {key: int(actor.get(key) or 0) for key in wanted} for name, actor in known.items()}


def _lengths(live: Any, last: Commit | None) -> Mapping[str, LengthTotals]:
    """Token class -> lengths: from the live totals of the hub, else from the last commit."""
    if isinstance(live, Mapping):
        return {str(name): LengthTotals(**totals) for name, totals in live.items()}
    return last.lengths if last else {}


def _steps_per_phase(config: Mapping[str, Any]) -> int:
    schedule = config.get("schedule", {})
    return int(schedule.get("steps_per_phase", 1)) if schedule.get("kind") == "conventional" else 1


def _eta(recent: Sequence[Commit], steps: int, phase: int) -> float | None:
    """Seconds to the last step at the median pace of `recent` steps: the time between two starts has no effect.

    phase: number of steps of a phase. The commits of a phase follow each other at once, so the pace is measured over
    whole phases. None before the second step. Of two paces the faster counts: the first step waits until the engines
    have started.
    """
    if len(recent) < 3:
        return None
    apart = phase if len(recent) >= phase + 2 else 1
    pairs = zip(recent, recent[apart:], strict=False)
    paces = [(b.committed_at - a.committed_at) / (b.step - a.step) for a, b in pairs]
    return max(0.0, statistics.median_low(paces) * (steps - recent[-1].step))


def _milliseconds(seconds: float | None) -> float | None:
    return seconds * 1000 if seconds is not None else None


def _clock(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
