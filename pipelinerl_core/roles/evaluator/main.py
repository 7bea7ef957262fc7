"""The evaluator: measures the held-out accuracy of durable weight versions, one after the other, on its own engine.

Accuracy = mean reward of one sample per held-out prompt at temperature 1. The ledger does not count these tokens.
"""

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np

from pipelinerl_core.config import RunConfig
from pipelinerl_core.config.sections import EmulationConfig
from pipelinerl_core.errors import RewardError
from pipelinerl_core.interfaces import Engine, Scorer
from pipelinerl_core.prompts import build_source
from pipelinerl_core.rewards.pool import build_scorer
from pipelinerl_core.roles.runtime.inference import base_weights, build_codec, heartbeats, open_engine
from pipelinerl_core.roles.runtime.monitor import RoleMonitor
from pipelinerl_core.roles.runtime.process import Arguments, RoleProcess, run_role
from pipelinerl_core.rollouts.runner import TextCodec, rollout_seed
from pipelinerl_core.run.context import RunContext
from pipelinerl_core.run.evaluations import next_to_evaluate
from pipelinerl_core.run.follow import RunFollower
from pipelinerl_core.run.records import Commit, EvalRecord, eval_key
from pipelinerl_core.run.reward_code import stored_code
from pipelinerl_core.run.versions import find_commits, names_several
from pipelinerl_core.types import EngineRequest, Prompt, Sampler, Score
from pipelinerl_core.weights.base import BaseWeights
from pipelinerl_core.weights.subscribe import WeightSubscriber

logger = logging.getLogger(__name__)

# Sequences decoded at once: an evaluation needs throughput, not low latency.
_CONCURRENCY = 256
_NUM_SAMPLES = 12


async def evaluate(
    engine: Engine, scorer: Scorer, codec: TextCodec, prompts: list[Prompt], config: RunConfig
) -> EvalRecord:
    """Sample each prompt once at temperature 1; returns the record of the engine's weight version."""
    started = time.monotonic()

    async def one(index: int, prompt: Prompt) -> tuple[float | None, int, str]:
        request = EngineRequest(
            request_id=f"eval.{index}",
            prompt_token_ids=codec.encode(prompt),
            max_tokens=config.rollouts.max_tokens,
            sampler=Sampler(seed=rollout_seed(config.seed, -1, index)),
        )
        async for chunk in engine.generate(request):
            if chunk.completion is not None:
                text = codec.decode(chunk.completion.token_ids)
                try:
                    reward = await scorer.score(prompt, text, chunk.completion)
                    return reward, len(chunk.completion.token_ids), text
                except RewardError as error:
                    logger.warning("%s: %s", prompt.prompt_id, error)
                    return None, len(chunk.completion.token_ids), text
        return None, 0, ""

    results = await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(prompts)))
    rewards = [reward for reward, _, _ in results if reward is not None]
    return EvalRecord(
        version=engine.weight_version,
        num_prompts=len(prompts),
        accuracy=float(np.mean(rewards)) if rewards else 0.0,
        mean_tokens=float(np.mean([length for _, length, _ in results])),
        errors=sum(reward is None for reward, _, _ in results),
        seconds=time.monotonic() - started,
        components=mean_components(rewards),
        samples=tuple(
            {"prompt": prompt.text, "completion": text, "reward": reward}
            for prompt, (reward, _, text) in list(zip(prompts, results, strict=True))[:_NUM_SAMPLES]
        ),
    )


def mean_components(rewards: Iterable[float]) -> dict[str, float]:
    """Component -> mean over the rewards with this component; empty if no reward has components."""
    values: dict[str, list[float]] = {}
    for reward in rewards:
        for component in reward.components if isinstance(reward, Score) else ():
            values.setdefault(component.name, []).append(component.value)
    return {name: float(np.mean(of_name)) for name, of_name in values.items()}


async def run(
    context: RunContext, version: str, enough: float | None = None, monitor: RoleMonitor | None = None
) -> list[EvalRecord]:
    """Evaluate the versions that `version` names, write evals/<version>.json for each; returns the new records.

    A single version is always evaluated. Of several versions, versions with a record are skipped, and later versions
    are skipped once two versions have reached the accuracy `enough`.
    """
    commits = {commit.step: commit for commit in find_commits(context, version)}
    known = _known_accuracies(context) if names_several(version) else {}
    records: list[EvalRecord] = []
    monitor = monitor or RoleMonitor("evaluator", "evaluator", context.run_id)
    async with _evaluation(context) as evaluation, heartbeats(monitor, evaluation.engine):
        monitor.set_readiness_check(lambda: "")
        while (step := next_to_evaluate(commits, known, enough)) is not None:
            record = await evaluation.measure(context, commits[step])
            context.store.put(eval_key(record.version), record.model_dump_json().encode())
            logger.info("version %d: accuracy %.3f in %.1f s", step, record.accuracy, record.seconds)
            known = {**known, step: record.accuracy}
            records.append(record)
    return records


def _known_accuracies(context: RunContext) -> Mapping[int, float]:
    follower = RunFollower(context.store)
    follower.refresh()
    return {step: record.accuracy for step, record in follower.evals.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Evaluation:
    """Engine, scorer and prompts, shared by all evaluated versions."""

    engine: Engine
    scorer: Scorer
    codec: TextCodec
    prompts: list[Prompt]
    base: BaseWeights | None

    async def measure(self, context: RunContext, commit: Commit) -> EvalRecord:
        """Swap in the weights of a commit and evaluate them."""
        assert commit.manifest is not None
        await self.engine.swap(WeightSubscriber(context.store, self.base).fetch(commit.manifest))
        return await evaluate(self.engine, self.scorer, self.codec, self.prompts, context.config)


@asynccontextmanager
async def _evaluation(context: RunContext) -> AsyncIterator[_Evaluation]:
    """The evaluation on the starting model, closed after the block. Accelerators are not emulated."""
    config = context.config
    wide = config.engine.model_copy(update={"concurrency": _CONCURRENCY})
    as_it_is = config.model_copy(update={"engine": wide, "emulation": EmulationConfig()})
    scorer = build_scorer(config, code=stored_code(context))
    engine = await open_engine(as_it_is, run_id=context.run_id, name="evaluator")
    try:
        prompts = build_source(config).held_out(config.eval.num_prompts)
        yield _Evaluation(
            engine=engine, scorer=scorer, codec=build_codec(config), prompts=prompts, base=base_weights(config)
        )
    finally:
        await scorer.close()
        await engine.close()


def _evaluate(own: RoleProcess) -> None:
    for record in asyncio.run(run(own.context, own.arguments.version, own.arguments.enough, own.monitor)):
        print(record.model_dump_json())  # noqa: T201


def main() -> int:
    """Command line of the role."""
    arguments: Arguments = {
        "--version": {"default": "last", "help": "first, last, all, or numbers with commas"},
        "--enough": {"type": float, "help": "of several: stop when two have reached this accuracy"},
        "--parent-pid": {"type": int},
    }
    description = "Held-out accuracy of weight versions."
    return run_role("evaluator", description, _evaluate, arguments, name="evaluator-{version}", heeds_stop=False)


if __name__ == "__main__":
    sys.exit(main())
