"""From a token to the version that sampled it and the step that trained it, and from a version to what made it.

C = tokens of a completion.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelinerl_core.data.codec import decode_batch, decode_rollouts, from_segment
from pipelinerl_core.data.compaction import list_rollouts, read_rollouts, removed_through
from pipelinerl_core.data.schema import ROLLOUT_SCHEMA, conform
from pipelinerl_core.data.trained import TrainedRows
from pipelinerl_core.errors import ConfigError, MissingObject, PipelineRLError, SchemaMismatch
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.messages import FateRecord, SwapRecord
from pipelinerl_core.report.document import swaps_of
from pipelinerl_core.report.samples import plain_text, token_decoder, token_texts
from pipelinerl_core.rollouts.task_columns import task_columns
from pipelinerl_core.run.follow import RunFollower
from pipelinerl_core.run.reading import list_keys
from pipelinerl_core.run.records import Commit
from pipelinerl_core.telemetry.log_lines import printable
from pipelinerl_core.types import Outcome, Rollout, TrainingRow

_PLACE = re.compile(r"v(?P<version>\d{1,15})|(?P<group>\d{1,15})(\.(?P<rollout>\d{1,9})(:(?P<token>\d{1,9}))?)?")


class Place(NamedTuple):
    """What is traced: a version, a group, one of its rollouts, or a token of the rollout."""

    version: int | None
    group: int | None
    rollout: int | None
    token: int | None


def parse_place(text: str) -> Place:
    """The place that a text like 12, 12.3, 12.3:40 or v7 names. Raises ConfigError for any other text."""
    if not (match := _PLACE.fullmatch(text)):
        raise ConfigError(
            f"{text!r}: give GROUP, GROUP.ROLLOUT, GROUP.ROLLOUT:TOKEN or vVERSION, for example 12.3:40"
        )
    values = {name: None if value is None else int(value) for name, value in match.groupdict().items()}
    return Place(**values)


def trace(store: ObjectStore, place: Place) -> dict[str, Any]:
    """The document of a place. Raises ConfigError if the run has no such version, group, rollout or token."""
    run = TracedRun(store)
    if place.version is not None:
        return {"version": run.version(place.version)}
    if place.rollout is not None:
        return rollout_of(run, place)[0]
    traced, rows = _group_of(run, place)
    amount = traced["step"]["amount"] if traced["step"] else 0.0
    return {**traced, "rollouts": [run.rollout_line(row, amount) for row in rows]}


def rollout_of(run: "TracedRun", place: Place) -> tuple[dict[str, Any], "TracedRow", "list[TracedRow]"]:
    """The document of a rollout or a token, the rollout, and all rollouts of its group. Raises ConfigError."""
    traced, rows = _group_of(run, place)
    chosen = next((row for row in rows if row.rollout.rollout_index == place.rollout), None)
    if chosen is None:
        known = ", ".join(str(row.rollout.rollout_index) for row in rows)
        raise ConfigError(
            f"group {place.group} has no rollout {place.rollout} in the store" + (f", but {known}" if known else "")
        )
    step = traced["step"]
    traced["rollout"] = run.rollout(chosen, step["amount"] if step else 0.0)
    if place.token is not None:
        traced["token"] = run.token(chosen, place.token, step)
    return traced, chosen, rows


def _group_of(run: "TracedRun", place: Place) -> tuple[dict[str, Any], "list[TracedRow]"]:
    """The document of a group and of its step, and its rollouts."""
    assert place.group is not None
    commit, fate = run.decision(place.group)
    rows = run.rows(place.group, commit, fate)
    step = run.step(commit) if commit is not None and fate is not None and fate.fate == "trained" else None
    return {"group": run.group(place.group, commit, fate, rows), "step": step}, rows


@dataclass(frozen=True, eq=False)
class TracedRow:
    """A rollout, with its training if it was trained."""

    rollout: Rollout
    training: TrainingRow | None = None

    @property
    def name(self) -> str:
        return f"{self.rollout.group_id}.{self.rollout.rollout_index}"

    @property
    def advantages_C(self) -> np.ndarray:
        """Advantage of each token; 0 where the token was not trained."""
        assert self.training is not None
        advantages_C = np.full(len(self.rollout.completion_token_ids), self.training.advantage)
        for turn, advantage in zip(self.rollout.turn_spans, self.training.turn_advantages, strict=False):
            advantages_C[turn.start : turn.end] = advantage
        return np.where(self.training.loss_mask, advantages_C, 0.0)

    @property
    def ratios_C(self) -> np.ndarray | None:
        """Importance ratio of each token, 1 where none was sampled; None if store.trainer_logprobs was not set."""
        if self.training is None or self.training.trainer_logprobs is None:
            return None
        ratios_C: np.ndarray = np.exp(self.training.trainer_logprobs - self.rollout.rollout_logprobs)
        return ratios_C

    @property
    def amounts_C(self) -> np.ndarray:
        """|advantage x weight in the loss x ratio| of each token; the ratio counts as 1 if it is not stored."""
        if self.training is None:
            return np.zeros(len(self.rollout.completion_token_ids))
        amounts_C: np.ndarray = np.abs(self.advantages_C) * self.training.loss_weight
        return amounts_C if self.ratios_C is None else amounts_C * self.ratios_C

    @property
    def amount(self) -> float:
        """Sum of `amounts_C`."""
        return float(self.amounts_C.sum())


class TracedRun:
    """The records of a run, and the texts of its tokens."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.follower = RunFollower(store)
        self._of_step: dict[int, list[TracedRow]] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read the new commits, and forget the rows that were read."""
        has_news = bool(self.follower.refresh().steps)
        self._of_step.clear()
        for name in ("trained_rows", *(("swaps",) if has_news else ())):
            self.__dict__.pop(name, None)

    @cached_property
    def decode(self) -> Any:
        """A function from token ids to text; None without the model's tokenizer."""
        return token_decoder(self.follower.run.model_path)

    @property
    def keep_rows(self) -> int:
        return int(self.follower.run.config.get("store", {}).get("keep_rows") or 0)

    @cached_property
    def trained_rows(self) -> TrainedRows:
        return TrainedRows(self.store)

    @cached_property
    def swaps(self) -> list[SwapRecord]:
        return swaps_of(list(self.follower.commits.values()))

    def decision(self, group: int) -> tuple[Commit | None, FateRecord | None]:
        """The commit that decided a group, and its fate; None if no commit has decided the group."""
        for step in reversed(self.follower.commits):
            commit = self.follower.commits[step]
            for fate in commit.fates:
                if fate.group_id == group:
                    return commit, fate
        return None, None

    def rows(self, group: int, commit: Commit | None, fate: FateRecord | None) -> list[TracedRow]:
        """The rollouts of a group that are in the store, by index.

        Raises ConfigError if no commit has decided the group and none of its rollouts is finished.
        """
        if commit is not None and fate is not None and fate.fate == "trained":
            rows = [row for row in self.step_rows(commit) if row.rollout.group_id == group]
            if rows and len(rows) < rows[0].rollout.group_size:  # the other rollouts have no reward
                others = self._untrained(group, fate.attempt, commit)
                rows += [TracedRow(rollout) for rollout in others if rollout.outcome is Outcome.ERROR]
        else:
            attempt = fate.attempt if fate is not None else None
            rows = [TracedRow(rollout) for rollout in self._untrained(group, attempt, commit)]
            if not rows and fate is None:
                raise ConfigError(
                    f"{self.follower.run.run_id} has no group {group}, or none of its rollouts is finished"
                )
        return sorted(rows, key=lambda row: row.rollout.rollout_index)

    def step_rows(self, commit: Commit) -> list[TracedRow]:
        """All rollouts that a step trained, in order; empty if `store.keep_rows` has removed them.

        Raises MissingObject if they are lost.
        """
        if commit.step not in self._of_step:
            try:
                batches = self.trained_rows.batches(commit)
            except MissingObject:
                if commit.step > removed_through(self.store, self.keep_rows):
                    raise
                batches = []
            self._of_step[commit.step] = [
                TracedRow(row.rollout, row) for batch in batches for row in decode_batch(batch)
            ]
        return self._of_step[commit.step]

    def _untrained(self, group: int, attempt: int | None, commit: Commit | None) -> list[Rollout]:
        """The rollouts of a group that was not trained: in a compacted object, or in a segment."""
        damaged: PipelineRLError | None = None
        for table in self._tables(commit):
            if isinstance(table, PipelineRLError):
                damaged = damaged or table
                continue
            is_own = pc.equal(table["group_id"], group)
            if attempt is not None:
                is_own = pc.and_(is_own, pc.equal(table["attempt"], attempt))
            chosen = table.filter(is_own)
            if len(chosen):
                newest = pc.max(chosen["attempt"])
                chosen = chosen.filter(pc.equal(chosen["attempt"], newest)).select(ROLLOUT_SCHEMA.names)
                batches = chosen.cast(ROLLOUT_SCHEMA).combine_chunks().to_batches()
                return [rollout for batch in batches for rollout in decode_rollouts(batch)]
        if damaged is not None and commit is not None:
            raise damaged
        return []

    def _tables(self, commit: Commit | None) -> Iterator[pa.Table | PipelineRLError]:
        """The objects that may have the rows, and for a damaged segment its error."""
        if commit is not None:
            for steps in list_rollouts(self.store):
                if steps.epoch == commit.epoch and commit.step in steps.steps:
                    yield read_rollouts(self.store, steps)
        for key in list_keys(self.store, "rollouts"):
            try:
                batches = [conform(batch) for batch in from_segment(self.store.get(key), key)]
            except MissingObject:  # compacted since the listing
                continue
            except SchemaMismatch as error:
                yield error
                continue
            yield pa.Table.from_batches(batches)

    def group(
        self, group: int, commit: Commit | None, fate: FateRecord | None, rows: Sequence[TracedRow]
    ) -> dict[str, Any]:
        """A group: its prompt, and what became of it."""
        prompt = {}
        if rows:
            first = rows[0].rollout
            prompt = {
                "prompt": plain_text(first.prompt_token_ids, self.decode), "task": task_columns(first.task),
                "source": first.source, "env": first.env, "prompt_id": first.prompt_id,
            }  # fmt: skip
        return {
            "group": group, "fate": fate.fate if fate is not None else "undecided",
            "step": commit.step if commit is not None else None, "num_rollouts": len(rows), **prompt,
        }  # fmt: skip

    def step(self, commit: Commit) -> dict[str, Any]:
        """A step; `amount` is the sum of `TracedRow.amounts_C` over its rows."""
        rows = self.step_rows(commit)
        trainings = [row.training for row in rows if row.training is not None]
        counts = {
            "num_groups": len({row.rollout.group_id for row in rows}), "num_rollouts": len(rows),
            "trained_tokens": sum(int(training.loss_mask.sum()) for training in trainings),
        }  # fmt: skip
        return {
            "step": commit.step, "epoch": commit.epoch, "makes_version": commit.step, "digest": commit.weights_digest,
            **(counts if rows else dict.fromkeys(counts)),
            "amount": sum(row.amount for row in rows), "committed_at": commit.committed_at,
            "metrics": {name: commit.metrics[name] for name in _STEP_METRICS if name in commit.metrics},
        }  # fmt: skip

    def version(self, version: int) -> dict[str, Any]:
        """A version: the step and the groups that made it, and who sampled with it."""
        if version not in self.follower.commits:
            newest = max(self.follower.commits, default=None)
            raise ConfigError(f"{self.follower.run.run_id} has no version {version}; the newest is {newest}")
        commit = self.follower.commits[version]
        step = self.step(commit)
        groups: dict[int, list[TracedRow]] = {}
        for row in self.step_rows(commit):
            groups.setdefault(row.rollout.group_id, []).append(row)
        evaluation = self.follower.evals.get(version)
        return {
            "version": version, "digest": commit.weights_digest, "step": step if version else None,
            "published_at": commit.manifest.published_at if commit.manifest else None,
            "accuracy": evaluation.known_accuracy if evaluation else None,
            "sampled_by": [swap.model_dump() for swap in self.swaps if swap.version == version],
            "groups": [
                {
                    "group": group, "rewards": [row.rollout.reward for row in of_group],
                    "share": _share(sum(row.amount for row in of_group), step["amount"]),
                }
                for group, of_group in sorted(groups.items(), key=lambda item: -sum(row.amount for row in item[1]))
            ],
        }  # fmt: skip

    def rollout_line(self, row: TracedRow, amount: float) -> dict[str, Any]:
        """The figures of a rollout. amount: of the step."""
        own = row.rollout
        return {
            "rollout": row.name, "reward": own.reward, "outcome": own.outcome.value,
            "finish_reason": own.finish_reason.value, "tokens": len(own.completion_token_ids),
            "advantage": row.training.advantage if row.training is not None else None,
            "share": _share(row.amount, amount) if row.training is not None else None,
            "versions": sorted({span.version for span in own.weight_spans}),
        }  # fmt: skip

    def rollout(self, row: TracedRow, amount: float) -> dict[str, Any]:
        """A rollout with its text, and for each span of tokens the version and the swap that brought it."""
        own, training = row.rollout, row.training
        return {
            **self.rollout_line(row, amount), "error": own.error,
            "components": {part.name: part.value for part in own.reward_components},
            "turn_advantages": list(training.turn_advantages) if training is not None else [],
            "loss_weight": training.loss_weight if training is not None else None,
            "trained_tokens": int(training.loss_mask.sum()) if training is not None else 0,
            "completion": plain_text(own.completion_token_ids, self.decode),
            "turns": [
                {"turn": number, "start": turn.start, "end": turn.end,
                 "reward": own.turn_rewards[number] if own.turn_rewards else None}
                for number, turn in enumerate(own.turn_spans)
            ],
            "spans": [
                {"version": span.version, "start": span.start, "end": span.end,
                 **self._sampled_by(own, span.start, span.version)}
                for span in own.weight_spans
            ],
            "started_at": own.started_at, "finished_at": own.finished_at, "scored_at": own.scored_at,
        }  # fmt: skip

    def token(self, row: TracedRow, place: int, step: dict[str, Any] | None) -> dict[str, Any]:
        """A token of a rollout. Raises ConfigError if the rollout is shorter."""
        own = row.rollout
        if place >= len(own.completion_token_ids):
            raise ConfigError(f"rollout {row.name} has {len(own.completion_token_ids)} tokens: no token {place}")
        span = next(span for span in own.weight_spans if span.start <= place < span.end)
        is_trained = row.training is not None and bool(row.training.loss_mask[place])
        ratios_C = row.ratios_C if own.loss_mask[place] else None
        return {
            "position": place, "token_id": int(own.completion_token_ids[place]),
            "text": token_texts(own.completion_token_ids[: place + 1], self.decode)[place],
            "logprob": float(own.rollout_logprobs[place]) if own.loss_mask[place] else None,
            "version": span.version, **self._sampled_by(own, place, span.version),
            "lag": step["step"] - 1 - span.version if step else None,
            "sampled": bool(own.loss_mask[place]), "trained": is_trained,
            "advantage": float(row.advantages_C[place]) if is_trained else None,
            "ratio": float(ratios_C[place]) if ratios_C is not None else None,
            "share": _share(float(row.amounts_C[place]), step["amount"]) if step and is_trained else None,
        }  # fmt: skip

    def _sampled_by(self, own: Rollout, place: int, version: int) -> dict[str, Any]:
        """The actor of a token, and its last swap to the token's version before the rollout ended."""
        actor, before = own.actor, 0
        for origin in own.origins:
            before += origin.num_tokens
            if place < before:
                actor = origin.actor
                break
        swaps = [swap for swap in self.swaps if (swap.actor, swap.version) == (actor, version)]
        # A swap is noted after its end: a short rollout may have ended before.
        earlier = [swap for swap in swaps if swap.at <= own.finished_at]
        swap = max(earlier, key=_swapped_at, default=min(swaps, key=_swapped_at, default=None))
        return {
            "actor": actor, "actor_epoch": swap.actor_epoch if swap is not None else None,
            "swapped_at": swap.at if swap is not None else None,
            "pause_seconds": swap.pause_seconds if swap is not None else None,
            # No swap brought a version that the actor has had since its start; the newest swaps are in no commit yet.
            "is_first_version": swap is None and not any(
                other.actor == actor and other.version < version for other in self.swaps
            ),
        }  # fmt: skip


def _swapped_at(swap: SwapRecord) -> float:
    return swap.at


_STEP_METRICS = ("reward/mean", "train/loss", "train/grad_norm", "importance/ess", "lag/mean")


def _share(amount: float, total: float) -> float | None:
    return amount / total if total > 0 else None


def trace_lines(document: dict[str, Any]) -> list[str]:
    """The document as printable text."""
    return [printable(line) for line in _lines(document)]


def _lines(document: dict[str, Any]) -> list[str]:
    if "version" in document:
        return _version_lines(document["version"])
    group, step = document["group"], document["step"]
    lines = [
        f"group {group['group']}: {group['fate']}" + ("" if group["step"] is None else f" in step {group['step']}")
    ]
    if "prompt" in group:
        lines += [f"  prompt    {group['prompt']!r}", f"  task      {group['task']}"]
    else:
        lines.append(
            "  its rows are not in the store: store.keep_rows has removed them, or it has no finished rollout"
        )
    lines += _step_lines(step) if step else []
    lines += [_rollout_line(row) for row in document.get("rollouts", ())]
    if rollout := document.get("rollout"):
        lines += _rollout_lines(rollout)
    if token := document.get("token"):
        lines += _token_lines(token)
    return lines


def _step_lines(step: dict[str, Any]) -> list[str]:
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in step["metrics"].items())
    counts = "its rows are removed"
    if step["num_rollouts"] is not None:
        counts = (
            f"{step['num_groups']} groups, {step['num_rollouts']} rollouts, {step['trained_tokens']:,} trained tokens"
        )
    return [
        f"step {step['step']}: {counts}; committed {_clock(step['committed_at'])}; made version "
        f"{step['makes_version']}, {step['digest'][:12]}",
        *([f"  {metrics}"] if metrics else []),
    ]


def _rollout_line(row: dict[str, Any]) -> str:
    reward = "none" if row["reward"] is None else f"{row['reward']:.4g}"
    trained = "not trained"
    if row["advantage"] is not None:
        trained = f"advantage {row['advantage']:+.4g}, {_percent(row['share'])} of the step"
    versions = row["versions"]
    spans = "no version"
    if versions:
        spans = f"version {versions[0]}" if len(versions) == 1 else f"versions {versions[0]} to {versions[-1]}"
    return (
        f"rollout {row['rollout']}: reward {reward}, {row['tokens']} tokens ({row['finish_reason']}), {spans}, "
        + trained
        + ("" if row["outcome"] == "scored" else f", outcome {row['outcome']}")
    )


def _rollout_lines(row: dict[str, Any]) -> list[str]:
    lines = [_rollout_line(row)]
    lines += [f"  component {name} {value:.4g}" for name, value in row["components"].items()]
    lines += [f"  error     {row['error']}"] if row["error"] else []
    lines += [
        f"  {span['start']:>5} to {span['end'] - 1:<5} version {span['version']}, {_who(span)}"
        for span in row["spans"]
    ]
    return [*lines, f"  completion {row['completion']!r}"]


def _token_lines(token: dict[str, Any]) -> list[str]:
    sampled = "given by the environment" if token["logprob"] is None else f"log-probability {token['logprob']:.4f}"
    trained = "not trained"
    if token["trained"]:
        trained = f"advantage {token['advantage']:+.4g}, {_percent(token['share'])} of the step"
    return [
        f"token {token['position']}: {token['text']!r} (id {token['token_id']}), {sampled}, version "
        f"{token['version']}, {_who(token)}"
        + ("" if token["lag"] is None else f", lag {token['lag']}")
        + ("" if token["ratio"] is None else f", ratio {token['ratio']:.4f}")
        + f"; {trained}"
    ]


def _version_lines(version: dict[str, Any]) -> list[str]:
    accuracy = "" if version["accuracy"] is None else f", held-out accuracy {version['accuracy']:.3f}"
    lines = [f"version {version['version']}: {version['digest'][:12]}{accuracy}"]
    lines += _step_lines(version["step"]) if version["step"] else ["  the weights before training"]
    for group in version["groups"]:
        rewards = ", ".join("none" if reward is None else f"{reward:.3g}" for reward in group["rewards"])
        lines.append(f"  group {group['group']}: {_percent(group['share'])} of the step, rewards {rewards}")
    lines += [
        f"  {swap['actor']} sampled with it from {_clock(swap['at'])} on, after {swap['num_tokens']:,} tokens"
        for swap in version["sampled_by"]
    ]
    return lines


def _who(sampled: dict[str, Any]) -> str:
    if sampled["swapped_at"] is None:
        since = "from its start on" if sampled["is_first_version"] else "whose swap no commit has yet"
        return f"{sampled['actor']}, {since}"
    return f"{sampled['actor']}, swapped {_clock(sampled['swapped_at'])} in {sampled['pause_seconds'] * 1000:.1f} ms"


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{share:.2%}"


def _clock(unix_seconds: float) -> str:
    return datetime.fromtimestamp(unix_seconds, tz=UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
