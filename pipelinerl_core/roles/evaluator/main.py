"""The evaluator: evaluates durable weight versions, one after the other, on its own engine.

`--version scheduled` runs beside training at low priority: version 0, the newest version that is due (config: eval),
the last version. A due version that a newer due version overtakes is skipped.
"""

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pipelinerl_core.config.sections import EmulationConfig
from pipelinerl_core.errors import MissingObject
from pipelinerl_core.interfaces import Engine
from pipelinerl_core.roles.runtime.evaluation import Evaluation
from pipelinerl_core.roles.runtime.inference import base_weights, heartbeats, open_engine
from pipelinerl_core.roles.runtime.monitor import RoleMonitor
from pipelinerl_core.roles.runtime.process import Arguments, RoleProcess, run_role
from pipelinerl_core.run.context import RunContext
from pipelinerl_core.run.evaluations import SCHEDULED, next_scheduled, next_to_evaluate
from pipelinerl_core.run.follow import RunFollower
from pipelinerl_core.run.records import Commit, EvalRecord
from pipelinerl_core.run.versions import DUE, find_commits, names_several
from pipelinerl_core.weights.base import BaseWeights
from pipelinerl_core.weights.subscribe import WeightSubscriber

logger = logging.getLogger(__name__)

NICENESS = 10
"""Niceness of an evaluator beside training: on busy cores about a tenth of the CPU time of a role (Linux)."""
_POLL_SECONDS = 1.0


async def run(context: RunContext, version: str, enough: float | None, monitor: RoleMonitor) -> list[EvalRecord]:
    """Evaluate the versions that `version` names and write their records; returns the records.

    A single version is always evaluated. Of several versions, versions with a record are skipped, and later versions
    are skipped once two versions have reached the accuracy `enough`.
    """
    commits = {} if version == SCHEDULED else {commit.step: commit for commit in find_commits(context, version)}
    follower = RunFollower(context.store)
    async with _evaluator(context, follower, monitor) as evaluator:
        monitor.set_readiness_check(lambda: "")
        if version == SCHEDULED:
            return await evaluator.follow()
        follower.refresh()
        known = {step: record.accuracy for step, record in follower.evals.items()} if names_several(version) else {}
        records: list[EvalRecord] = []
        while (step := next_to_evaluate(commits, known, enough)) is not None:
            is_subset = version == DUE and step < max(commits) and context.config.evaluates(step)
            records.append(await evaluator.evaluate(commits[step], is_subset=is_subset))
            known[step] = records[-1].accuracy
        return records


@dataclass(frozen=True, slots=True, kw_only=True)
class _Evaluator:
    """An engine with its sets of prompts, shared by all evaluated versions."""

    context: RunContext
    follower: RunFollower
    engine: Engine
    evaluation: Evaluation
    base: BaseWeights | None

    async def evaluate(self, commit: Commit, *, is_subset: bool = False) -> EvalRecord:
        """Swap in the weights of a commit and evaluate them."""
        assert commit.manifest is not None
        config = self.context.config.eval
        update = await asyncio.to_thread(WeightSubscriber(self.context.store, self.base).fetch, commit.manifest)
        await self.engine.swap(update)
        if is_subset:
            return await self.evaluation.run(min(config.subset, config.num_prompts))
        if commit.step == 0:
            return await self.evaluation.run(config.num_prompts, config.max_seconds)
        return await self.evaluation.run(config.num_prompts)

    async def follow(self) -> list[EvalRecord]:
        """Evaluate versions as they come, until the last version is evaluated."""
        config, records = self.context.config, []
        while config.trainer.steps not in self.follower.evals:
            await asyncio.to_thread(self.follower.refresh)
            step = next_scheduled(config, self.follower.commits, self.follower.evals)
            if step is None:
                await asyncio.sleep(_POLL_SECONDS)
                continue
            commit = self.follower.commits[step]
            try:
                records.append(await self.evaluate(commit, is_subset=config.evaluates(step)))
            except MissingObject as error:
                await asyncio.to_thread(self.follower.refresh)
                if next_scheduled(config, self.follower.commits, self.follower.evals) == step:
                    raise
                logger.warning("version %d is left out, a newer version is due: %s", step, error)
            await asyncio.to_thread(self.follower.refresh)
        return records


@asynccontextmanager
async def _evaluator(context: RunContext, follower: RunFollower, monitor: RoleMonitor) -> AsyncIterator[_Evaluator]:
    """The evaluator on the starting model, closed after the block. Accelerators are not emulated."""
    config = context.config.for_evaluation
    slots = config.evaluation_slots
    wide = config.engine.model_copy(update={"concurrency": slots})
    as_it_is = config.model_copy(update={"engine": wide, "emulation": EmulationConfig()})
    engine = await open_engine(as_it_is, run_id=context.run_id, name="evaluator")

    def newest_step() -> int:
        follower.refresh()
        return follower.last.step if follower.last else -1

    def report(progress: str) -> None:
        monitor.progress = progress

    try:
        evaluation = Evaluation(context, engine, slots=slots, newest_step=newest_step, report=report)
        async with heartbeats(monitor, engine):
            yield _Evaluator(
                context=context, follower=follower, engine=engine, evaluation=evaluation, base=base_weights(config)
            )
            await evaluation.close()
    finally:
        await engine.close()


def _evaluate(own: RoleProcess) -> None:
    if own.arguments.version == SCHEDULED:
        os.nice(NICENESS)
    for record in asyncio.run(run(own.context, own.arguments.version, own.arguments.enough, own.monitor)):
        print(record.model_dump_json())  # noqa: T201


def main() -> int:
    """Command line of the role."""
    arguments: Arguments = {
        "--version": {"default": "last", "help": "first, last, all, due, numbers with commas, or scheduled"},
        "--enough": {"type": float, "help": "of several: stop when two have reached this accuracy"},
        "--parent-pid": {"type": int},
    }
    description = "Held-out accuracy of weight versions."
    return run_role("evaluator", description, _evaluate, arguments, name="evaluator-{version}", heeds_stop=False)


if __name__ == "__main__":
    sys.exit(main())
