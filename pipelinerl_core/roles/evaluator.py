"""The evaluator: held-out accuracy of one durable weight version, on an engine of its own.

Accuracy = mean reward of one sample at temperature 1 on held-out prompts. Its tokens are not in the ledger.
"""

import argparse
import asyncio
import logging
import sys
import time

import numpy as np

from pipelinerl_core.config import RunConfig
from pipelinerl_core.errors import ConfigError, PipelineRLError, RewardError
from pipelinerl_core.interfaces import Engine, Scorer
from pipelinerl_core.prompts import build_source
from pipelinerl_core.records import Commit, EvalRecord, eval_key
from pipelinerl_core.rewards.pool import build_scorer
from pipelinerl_core.roles.context import RunContext, open_run
from pipelinerl_core.roles.history import counted_commit_keys, read_commit, read_epochs
from pipelinerl_core.roles.inference import build_codec, build_engine
from pipelinerl_core.roles.process import configure_logging, die_with_parent, limit_threads
from pipelinerl_core.rollouts.runner import TextCodec, rollout_seed
from pipelinerl_core.types import EngineRequest, Prompt, Sampler
from pipelinerl_core.weights.subscribe import WeightSubscriber

logger = logging.getLogger(__name__)

# Sequences decoded at once: throughput is all that counts here.
_CONCURRENCY = 256
_NUM_SAMPLES = 12


def find_commit(context: RunContext, version: str) -> Commit:
    """The commit of `first`, `last` or a number, whose weights are durable; ConfigError otherwise."""
    commits = counted_commit_keys(context.store, read_epochs(context.store))
    if not commits:
        raise ConfigError(f"{context.store.url}: nothing is committed yet, there are no weights to evaluate")
    if version == "first":
        return read_commit(context.store, commits[min(commits)])
    if version == "last":
        for step in sorted(commits, reverse=True):
            commit = read_commit(context.store, commits[step])
            if commit.manifest is not None and commit.manifest.key is not None:
                return commit
    if not version.isdigit() or int(version) not in commits:
        raise ConfigError(f"--version {version}: not committed. Take first, last or a number up to {max(commits)}")
    commit = read_commit(context.store, commits[int(version)])
    if commit.manifest is None or commit.manifest.key is None:
        raise ConfigError(
            f"--version {version}: its weights are not durable (weights.durable_every="
            f"{context.config.weights.durable_every}); replay can rebuild them"
        )
    return commit


async def evaluate(
    engine: Engine, scorer: Scorer, codec: TextCodec, prompts: list[Prompt], config: RunConfig
) -> EvalRecord:
    """One sample per prompt at temperature 1."""
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
                    return await scorer.score(prompt, text), len(chunk.completion.token_ids), text
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
        samples=tuple(
            {"prompt": prompt.text, "completion": text, "reward": reward}
            for prompt, (reward, _, text) in list(zip(prompts, results, strict=True))[:_NUM_SAMPLES]
        ),
    )


def _wide(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"engine": config.engine.model_copy(update={"concurrency": _CONCURRENCY})})


async def run(context: RunContext, version: str) -> EvalRecord:
    """Evaluate and write evals/<version>.json."""
    commit = find_commit(context, version)
    assert commit.manifest is not None
    update = WeightSubscriber(context.store).fetch(commit.manifest)
    engine = build_engine(_wide(context.config))
    scorer = build_scorer(context.config)
    try:
        await engine.swap(update)
        prompts = build_source(context.config).held_out(context.config.eval.num_prompts)
        record = await evaluate(engine, scorer, build_codec(context.config), prompts, context.config)
    finally:
        await scorer.close()
        await engine.close()
    context.store.put(eval_key(record.version), record.model_dump_json().encode())
    return record


def main() -> int:
    """Command line of the role."""
    parser = argparse.ArgumentParser(description="Held-out accuracy of one weight version.")
    parser.add_argument("--run", required=True)
    parser.add_argument("--version", default="last", help="first, last or a number")
    parser.add_argument("--parent-pid", type=int)
    arguments = parser.parse_args()
    if arguments.parent_pid is not None:
        die_with_parent(arguments.parent_pid)
    configure_logging()
    try:
        context = open_run(arguments.run)
        limit_threads(context.config.placement.threads)
        record = asyncio.run(run(context, arguments.version))
    except ConfigError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 2
    except PipelineRLError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
        return 1
    print(record.model_dump_json())  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
