"""The views of a run in SQL, and the meaning of each column: the one home of their definitions.

A view is either a SELECT over other relations, of which DuckDB reads only the columns and steps that a statement
needs, or a table that `RunReader` makes of records.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

ROWS = """
SELECT * FROM stored_rows
UNION ALL BY NAME
SELECT segment_rows.*, group_fates.step, if(group_fates.fate = 'trained', 'failed', group_fates.fate) AS fate
FROM segment_rows JOIN open_groups USING (run_id) LEFT JOIN group_fates USING (run_id, group_id, attempt)
WHERE group_fates.fate <> 'trained' OR (segment_rows.outcome = 'error' AND group_fates.fate = 'trained')
    OR (group_fates.fate IS NULL
    AND (group_id >= next_group_id OR list_contains(open_groups, group_id)))
"""
"""Every row once. A row of a segment without a fate belongs to an open group, or to a lease that another replaced."""

_KEY = {
    "run_id": ("run_id", "Run."),
    "step": ("step", "Step that trained the row, or whose commit decided the group; null while it is undecided."),
    "group_id": ("group_id", "Position of the group in the prompt ledger."),
    "attempt": ("attempt", "Number of the group's lease that produced the row."),
}
_ROLLOUT_KEY = {**_KEY, "rollout_index": ("rollout_index", "Place within the group, from 0.")}
_LIST_SUM_TRAINED = "coalesce(len(list_filter(loss_mask_trained, lambda x: x)), 0)"


class Column(NamedTuple):
    """A column of a view."""

    expression: str
    """SQL over the source of the view; of a view of records, the type."""
    meaning: str


class View(NamedTuple):
    """A view over runs."""

    meaning: str
    source: str
    """What follows FROM; empty for a view of records, which `RunReader` has as a method of the view's name."""
    columns: Mapping[str, Column]
    uses: tuple[str, ...] = ()
    """Relations of `source` that are made of the store; none for a view of records."""
    group_by: int = 0
    """The first columns by which the rows are grouped."""

    def select(self) -> str:
        """The SELECT of a view with a source."""
        columns = ", ".join(f'{column.expression} AS "{name}"' for name, column in self.columns.items())
        group_by = ", ".join(str(number + 1) for number in range(self.group_by))
        return f"SELECT {columns} FROM {self.source}" + (f" GROUP BY {group_by}" if group_by else "")


def _columns(**columns: tuple[str, str]) -> Mapping[str, Column]:
    return MappingProxyType({name: Column(*column) for name, column in columns.items()})


_OF_ROWS = ("stored_rows", "segment_rows", "group_fates", "open_groups")
_TURN_SOURCE = """(SELECT *, spans[number] AS span FROM (SELECT *, unnest(range(1, len(spans) + 1)) AS number FROM (
    SELECT *, coalesce(turn_spans, [{'start': 0::INTEGER, 'end': len(completion_token_ids)::INTEGER}]) AS spans
    FROM rows)))"""

_ROLLOUTS = View(
    "One row per sampled completion that is in the store: trained, not trained, and not decided yet.",
    "rows",
    _columns(
        **_ROLLOUT_KEY,
        fate=("fate", "trained, filtered, dropped_stale, failed or quarantined; null while the group is undecided."),
        position=('"order"', "Position of the row in its step, from 0; null if not trained."),
        prompt_id=("prompt_id", "Digest of the prompt's source and text."),
        source=("source", "Name of the prompt source."),
        env=("env", "Name of the verifier or environment."),
        task=("task::JSON", "Columns of the prompt's row, or the environment's task: `task->>'answer'`."),
        actor=("actor", "Actor that finished the rollout."),
        reward=("reward", "Score; null with outcome error."),
        components=(
            "map_from_entries(coalesce(reward_components, []))",
            "Components of the reward before their weights: `components['format']`.",
        ),
        outcome=("outcome", "scored or error."),
        error=("error", "Error of the engine, the verifier or the environment; null without an error."),
        finish_reason=("finish_reason", "stop, length or abort."),
        num_prompt_tokens=("len(prompt_token_ids)", "Tokens of the prompt."),
        num_tokens=("len(completion_token_ids)", "Tokens of the completion."),
        num_trained_tokens=(_LIST_SUM_TRAINED, "Tokens that were trained, after the lag rule."),
        num_turns=("coalesce(len(turn_spans), 1)", "Turns of the model."),
        advantage=("advantage", "Advantage of the row, of several turns that of turn 0; null if not trained."),
        loss_weight=("loss_weight", "Weight of each token of the row in the loss; null if not trained."),
        mean_logprob=(
            "list_avg(list_where(rollout_logprobs, loss_mask))",
            "Mean log-probability of the sampled tokens, nats; its negative estimates the entropy.",
        ),
        first_version=("weight_spans[1].version", "Weight version that sampled the first token."),
        last_version=("weight_spans[-1].version", "Weight version that sampled the last token."),
        lag=("step - 1 - weight_spans[1].version", "Steps between the first token's version and the trained one."),
        temperature=("temperature", "Sampling temperature."),
        top_p=("top_p", "Probability mass of nucleus sampling."),
        seed=("seed", "Seed of the sampling noise."),
        started_at=("started_at", "Unix seconds when the first token was requested."),
        finished_at=("finished_at", "Unix seconds when the last token was sampled."),
        scored_at=("scored_at", "Unix seconds when the reward was known."),
        prompt=("decoded(run_id, prompt_token_ids)", "Text of the prompt."),
        completion=("decoded(run_id, completion_token_ids)", "Text of the completion."),
        prompt_token_ids=("prompt_token_ids", "Token ids of the prompt."),
        completion_token_ids=("completion_token_ids", "Token ids of the completion."),
        weight_spans=("weight_spans", "Version of the tokens [start, end)."),
    ),
    _OF_ROWS,
)

_TOKEN_SOURCE = (
    "(SELECT *, unnest(range(span.start, span.end)) AS place FROM (SELECT *, unnest(weight_spans) AS span FROM rows))"
)
_TURN_OF_TOKEN = "greatest(len(list_filter(coalesce(turn_spans, []), lambda x: x.start <= place)) - 1, 0)"
_IS_TRAINED = "coalesce(loss_mask_trained[place + 1], false)"

VIEWS: Mapping[str, View] = MappingProxyType(
    {
        "runs": View(
            "One row per run, as `pipelinerl runs --json` has it.",
            "",
            _columns(
                run_id=("VARCHAR", "Run."),
                created_at=("DOUBLE", "Unix seconds of the start."),
                state=("VARCHAR", "running, stopped, finished or unreadable."),
                step=("BIGINT", "Newest committed step."),
                steps=("BIGINT", "Planned steps."),
                model=("VARCHAR", "`model.path`."),
                owner=("VARCHAR", "Owner."),
                tags=("VARCHAR[]", "Tags."),
                notes=("VARCHAR", "Notes."),
                parent=("VARCHAR", "Version that the run started from, RUN@STEP; empty: the model itself."),
                reward=("DOUBLE", "Mean reward of the newest step."),
                held_out_first=("DOUBLE", "Held-out accuracy of the first evaluated version."),
                held_out_last=("DOUBLE", "Held-out accuracy of the newest evaluated version."),
                tokens=("BIGINT", "Generated tokens."),
                seconds=("DOUBLE", "Seconds of training."),
                gpus=("BIGINT", "GPUs that the configuration uses at the same time."),
                url=("VARCHAR", "Store of the run."),
                problem=("VARCHAR", "Why the run is unreadable."),
            ),
        ),
        "steps": View(
            "One row per committed step; step 0 are the initial weights.",
            "",
            _columns(
                run_id=("VARCHAR", "Run."),
                step=("BIGINT", "Step."),
                epoch=("BIGINT", "Epoch of the trainer that committed the step."),
                reserved_at=("DOUBLE", "Unix seconds when the groups of the step were reserved."),
                computed_at=("DOUBLE", "Unix seconds after the optimizer step."),
                committed_at=("DOUBLE", "Unix seconds of the commit."),
                seconds=("DOUBLE", "Seconds since the previous commit."),
                generated=("BIGINT", "Generated tokens since the start of the run."),
                trained=("BIGINT", "Trained tokens since the start of the run."),
                masked_stale=("BIGINT", "Tokens that the lag rule has masked since the start of the run."),
                metrics=("MAP(VARCHAR, DOUBLE)", "Every [metric](metrics.md): `metrics['policy/entropy']`."),
            ),
        ),
        "metrics": View(
            "One row per step and metric.",
            "steps, unnest(map_entries(metrics)) AS entries(entry)",
            _columns(
                run_id=("run_id", "Run."),
                step=("step", "Step."),
                name=("entry.key", "Name of the [metric](metrics.md)."),
                value=("entry.value", "Value."),
            ),
            ("steps",),
        ),
        "rollouts": _ROLLOUTS,
        "groups": View(
            "One row per group: the completions of a prompt.",
            "rows",
            _columns(
                **_KEY,
                prompt_id=("prompt_id", "Digest of the prompt's source and text."),
                source=("source", "Name of the prompt source."),
                env=("env", "Name of the verifier or environment."),
                fate=(
                    "CASE WHEN bool_or(fate = 'trained') THEN 'trained' ELSE any_value(fate) END",
                    "Fate of the group. Rollouts without a reward of a trained group have the fate failed.",
                ),
                task=("any_value(task)::JSON", "As in `rollouts`."),
                num_rollouts=("count(*)", "Completions."),
                num_errors=("count(*) FILTER (outcome = 'error')", "Completions without a reward."),
                mean_reward=("avg(reward)", "Mean reward."),
                min_reward=("min(reward)", "Lowest reward."),
                max_reward=("max(reward)", "Highest reward."),
                std_reward=("stddev_pop(reward)", "Standard deviation of the rewards; 0: nothing to learn from."),
                num_tokens=("sum(len(completion_token_ids))::BIGINT", "Tokens of all completions."),
                started_at=("min(started_at)", "Unix seconds when the first token was requested."),
                scored_at=("max(scored_at)", "Unix seconds when all rewards were known."),
            ),
            _OF_ROWS,
            group_by=7,
        ),
        "turns": View(
            "One row per turn of a rollout; a completion without turns is turn 0.",
            _TURN_SOURCE,
            _columns(
                **_ROLLOUT_KEY,
                turn=("number - 1", "Number of the turn, from 0."),
                first_position=("span.start", "Position of the turn's first token in the completion."),
                num_tokens=("span.end - span.start", "Tokens of the turn."),
                reward=("turn_rewards[number]", "Part of the reward that belongs to the turn; null without parts."),
                advantage=("coalesce(turn_advantages[number], advantage)", "Advantage of the turn's tokens."),
                given=(
                    "decoded(run_id, completion_token_ids[coalesce(turn_spans[number - 1].end, 0) + 1:span.start])",
                    "Text between the previous turn and this turn, which the environment gave.",
                ),
                text=("decoded(run_id, completion_token_ids[span.start + 1:span.end])", "Text of the model."),
            ),
            _OF_ROWS,
        ),
        "tokens": View(
            "One row per token of a completion.",
            _TOKEN_SOURCE,
            _columns(
                **_ROLLOUT_KEY,
                position=("place", "Position in the completion, from 0."),
                turn=(_TURN_OF_TOKEN, "Number of the turn; a token between turns belongs to the turn before."),
                token_id=("completion_token_ids[place + 1]", "Token id."),
                text=("token_text(run_id, completion_token_ids[place + 1])", "Text of the token."),
                logprob=("rollout_logprobs[place + 1]", "Log-probability when sampled, nats; 0 if not sampled."),
                trainer_logprob=(
                    "trainer_logprobs[place + 1]",
                    "Log-probability under the weights that the step trained; null without `store.trainer_logprobs`.",
                ),
                ratio=(
                    "CASE WHEN loss_mask[place + 1] "
                    "THEN exp(trainer_logprobs[place + 1] - rollout_logprobs[place + 1]) END",
                    "Importance ratio, before any truncation; null without `store.trainer_logprobs`.",
                ),
                version=("span.version", "Weight version that sampled the token."),
                lag=("step - 1 - span.version", "Steps between that version and the trained one."),
                sampled=("loss_mask[place + 1]", "Whether the model sampled the token."),
                trained=(_IS_TRAINED, "Whether the token was trained, after the lag rule."),
                advantage=(
                    f"CASE WHEN {_IS_TRAINED} THEN coalesce(turn_advantages[{_TURN_OF_TOKEN} + 1], advantage) END",
                    "Advantage; null if not trained.",
                ),
                loss_weight=(
                    f"CASE WHEN {_IS_TRAINED} THEN loss_weight END",
                    "Weight in the loss; null if not trained.",
                ),
            ),
            _OF_ROWS,
        ),
        "versions": View(
            "One row per weight version; step n makes version n.",
            "",
            _columns(
                run_id=("VARCHAR", "Run."),
                version=("BIGINT", "Version; 0 for the initial weights."),
                epoch=("BIGINT", "Epoch of the trainer that made the version."),
                digest=("VARCHAR", "BLAKE3 of the weights."),
                published_at=("DOUBLE", "Unix seconds; null if the version was not published."),
                num_bytes=("BIGINT", "Bytes of the published file, or of the difference that stands for it."),
                stored=("BOOLEAN", "Whether the store has the weights."),
            ),
        ),
        "swaps": View(
            "One row per swap of weights in an actor's engine.",
            "",
            _columns(
                run_id=("VARCHAR", "Run."),
                step=("BIGINT", "Step whose commit reports the swap."),
                actor=("VARCHAR", "Actor."),
                actor_epoch=("BIGINT", "Start of the actor."),
                version=("BIGINT", "Version that the engine took."),
                swapped_at=("DOUBLE", "Unix seconds."),
                pause_seconds=("DOUBLE", "Seconds without sampling."),
                num_bytes=("BIGINT", "Bytes of the version's file, or of the difference that stands for it."),
                num_running=("BIGINT", "Sequences that went on under the new version."),
                num_tokens=("BIGINT", "Tokens that the actor epoch had sampled before."),
            ),
        ),
        "actors": View(
            "One row per actor epoch and step: the state before the step's reservation.",
            "",
            _columns(
                run_id=("VARCHAR", "Run."),
                step=("BIGINT", "Step."),
                actor=("VARCHAR", "Actor."),
                actor_epoch=("BIGINT", "Start of the actor."),
                sampled_at=("DOUBLE", "Unix seconds."),
                engine_version=("BIGINT", "Version of the engine."),
                running=("BIGINT", "Running sequences."),
                waiting=("BIGINT", "Waiting sequences."),
                concurrency=("BIGINT", "Limit of running sequences."),
                num_tokens=("BIGINT", "Tokens that the actor epoch has sampled."),
                running_seconds=("DOUBLE", "Integral of the running sequences over time, seconds."),
                mismatch=("DOUBLE", "Re-scoring: mean |engine - trainer| under the same version, nats."),
                stale_kv=("DOUBLE", "Re-scoring: the same of tokens with older context."),
                staleness=("DOUBLE", "Re-scoring: policy before the step against the sampling version, nats."),
                alarm=("VARCHAR", "What is wrong with the actor; empty without an alarm."),
            ),
        ),
        "evaluations": View(
            "One row per evaluated version and set of held-out prompts.",
            "",
            _columns(
                run_id=("VARCHAR", "Run."),
                version=("BIGINT", "Evaluated version."),
                last_version=("BIGINT", "Version of the last sampled token."),
                set=("VARCHAR", "Name in eval.sets, or part of a mixture; empty: the run's own held-out prompts."),
                num_prompts=("BIGINT", "Prompts."),
                num_samples=("BIGINT", "Completions per prompt."),
                accuracy=("DOUBLE", "Mean reward over prompts."),
                low=("DOUBLE", "Lower end of its 95 % interval."),
                high=("DOUBLE", "Upper end of its 95 % interval."),
                best=("DOUBLE", "Mean over prompts of the best reward."),
                greedy=("DOUBLE", "Mean reward of greedy completions."),
                components=("MAP(VARCHAR, DOUBLE)", "Component of the reward -> mean."),
                mean_tokens=("DOUBLE", "Mean length of the completions."),
                errors=("BIGINT", "Completions without a reward."),
                seconds=("DOUBLE", "Duration."),
                finished_at=("DOUBLE", "Unix seconds."),
                newest_step=("BIGINT", "Newest committed step when the evaluation ended."),
                samples=("JSON", "A few completions: prompt, completion, reward, reference, task."),
            ),
        ),
    }
)
"""Name -> view."""
