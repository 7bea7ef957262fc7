"""The scorer of a run: a pool of scoring child processes."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from pipelinerl_core.config.prompts import ReasoningGymPrompts
from pipelinerl_core.config.run import RunConfig
from pipelinerl_core.config.verifier import verifier_name
from pipelinerl_core.errors import ConfigError, RewardError
from pipelinerl_core.gym.options import options_of
from pipelinerl_core.gym.tasks import evaluating, scored_tasks
from pipelinerl_core.rewards.child import ScoringChild
from pipelinerl_core.rewards.function import PROMPT_MESSAGES, FunctionSpec
from pipelinerl_core.rewards.worker import ChildSpec
from pipelinerl_core.sandbox import isolation
from pipelinerl_core.sandbox.child_process import check_variables
from pipelinerl_core.types import Completion, FinishReason, Prompt, Score

logger = logging.getLogger(__name__)

GIBIBYTE = 1 << 30

VERIFIERS = MappingProxyType(
    {
        "sums": ("pipelinerl_core.rewards.verifiers:sums", 2 * GIBIBYTE),
        "exact_match": ("pipelinerl_core.rewards.verifiers:exact_match", 2 * GIBIBYTE),
        "last_number": ("pipelinerl_core.rewards.verifiers:last_number", 2 * GIBIBYTE),
        "reasoning_gym": ("pipelinerl_core.rewards.gym:reasoning_gym", 4 * GIBIBYTE),
    }
)
"""Verifier -> (function, limit of the child's address space in bytes)."""


FUNCTION_BYTES = 16 * GIBIBYTE
"""Limit of the address space with a user's reward function, which may import any library."""


def build_scorer(
    config: RunConfig, count_lost: Callable[[str], None] = lambda cause: None, code: str | None = None
) -> "ProcessScorer":
    """The scorer of a run; starts no process. `count_lost` is called with the cause of each lost scoring (forked.py).

    code: the text of the file that reward.function names; None for a module. Raises ConfigError if the verifier
    cannot score these prompts, or evaluates text and this host lacks isolation.
    """
    reward, evaluated = config.reward, evaluating(scored_tasks(config))
    function, memory_bytes, prepare = _verifier(config, code)
    spec = ChildSpec(
        name=verifier_name(config),
        function=function,
        timeout_seconds=reward.timeout_seconds,
        timeout_reward=reward.timeout_reward,
        memory_bytes=memory_bytes,
        prepare=prepare,
        is_users=bool(reward.function),
        is_sealed=reward.isolation == "auto",
        network=reward.network,
        environment=reward.environment,
        forks=bool(evaluated),
    )
    if spec.is_sealed:
        _check_host(spec, evaluated)
    return ProcessScorer(spec, reward.workers, count_lost)


def _verifier(config: RunConfig, code: str | None) -> tuple[str, int, Any]:
    """`function`, `memory_bytes` and `prepare` of a ChildSpec."""
    reward, prompts = config.reward, config.prompts
    if reward.function:
        check_variables("reward.environment", reward.environment)
        spec = FunctionSpec(function=reward.function, code=code, weights=reward.weights, has_network=reward.network)
        kind = "RewardFunctions" if "," in reward.function else "RewardFunction"
        return f"pipelinerl_core.rewards.function:{kind}", FUNCTION_BYTES, asdict(spec)
    tasks = scored_tasks(config)
    options = {task: options_of(prompts, task) for task in tasks if isinstance(prompts, ReasoningGymPrompts)}
    return *VERIFIERS[verifier_name(config)], options or None


def _parameters(prompt: Prompt, completion: Completion | None) -> dict[str, Any]:
    """The parameters of a user's reward function, other than `text`."""
    if completion is None:
        completed: dict[str, Any] = {"token_ids": [], "finish_reason": FinishReason.STOP}
    else:
        completed = {"token_ids": completion.token_ids.tolist(), "finish_reason": completion.finish_reason}
    if prompt.messages:
        completed[PROMPT_MESSAGES] = list(prompt.messages)
    return {**prompt.task, "prompt": prompt.text, **completed}


def _check_host(spec: ChildSpec, evaluated_tasks: list[str]) -> None:
    if not (lacks := " and ".join(isolation.missing())):
        return
    if spec.forks:
        raise ConfigError(
            f"prompts.tasks={', '.join(evaluated_tasks)}: the scorer evaluates a model's text, but this host "
            f"has no {lacks}. Remove the tasks, or run actors on hosts that have it"
        )
    logger.warning("verifier %s: scoring processes are only partly isolated: this host has no %s", spec.name, lacks)


class ProcessScorer:
    """Scores in child processes; each request goes to the child with the shortest queue.

    Children start with the first requests. All methods run on one event loop, whose thread must outlive the scorer.
    """

    def __init__(
        self, spec: ChildSpec, num_workers: int, count_lost: Callable[[str], None] = lambda cause: None
    ) -> None:
        """Start no process yet; `spec` applies to each of the `num_workers` children."""
        self._spec = spec
        self._children = [ScoringChild(spec, count_lost) for _ in range(num_workers)]

    async def score(self, prompt: Prompt, text: str, completion: Completion | None = None) -> Score:
        """The reward of a completion. Raises RewardError (one line) if the scoring failed.

        A scoring that exceeds its deadline has reward 0. If the child dies otherwise, two retries follow.
        """
        if prompt.env != self._spec.name:
            raise RewardError(f"verifier {self._spec.name}: the prompt asks for verifier {prompt.env}")
        child = min(self._children, key=lambda candidate: candidate.num_requests)
        return await child.submit(text, _parameters(prompt, completion) if self._spec.is_users else prompt.task)

    async def close(self) -> None:
        """End the child processes; unanswered requests fail with RewardError."""
        await asyncio.gather(*(child.close() for child in self._children))
