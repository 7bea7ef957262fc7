"""The section of verifiers and reward functions; the text below a field is its help."""

from typing import Literal

from pydantic import Field

from pipelinerl_core.config.section import Section


class RewardConfig(Section):
    """How completions are scored: in child processes, with hard limits."""

    kind: Literal["auto", "exact_match", "last_number", "sums", "reasoning_gym"] = "auto"
    """Verifier that scores completions. exact_match: the whole answer, or the answer in a box or after ####, equals
    the reference; last_number: the last number of the completion equals the last number of the reference; sums,
    reasoning_gym: for the prompts of these kinds; auto: the verifier of prompts.kind (exact_match for files and data
    sets)."""
    function: str = ""
    """Your own reward function instead of a verifier: FILE.py:FUNCTION, or package.module:FUNCTION (docs/rewards.md).
    FILE.py:A,B: several, whose rewards are added, each a component of its name. The run stores a copy of the file."""
    weights: dict[str, float] = Field({})
    """reward.function: weight of each named component that the function returns; 1 for a component without an entry.
    environment.path: replaces weights of the class by name. Example: reward.weights.correct=2."""
    network: bool = False
    """reward.function may open network connections, for example to a judge. Raise reward.workers too, because each
    scoring process waits for one answer at a time."""
    environment: tuple[str, ...] = ()
    """Names of environment variables that reward.function may read, for example ["JUDGE_KEY"]; set the variables on
    every host that runs actors. Values are not stored."""
    workers: int = Field(1, ge=1)
    """Scoring processes per actor. Raise if completions wait for their rewards."""
    timeout_seconds: float = Field(5.0, gt=0)
    """Seconds that scoring one completion may take; then the scoring process is killed and the completion has the
    reward timeout_reward. Raise for slow verifiers."""
    timeout_reward: float = Field(0.0, ge=-1e9, le=1e9)
    """Reward of a completion whose scoring takes longer than timeout_seconds. Set to the lowest reward of a function
    with negative rewards: otherwise a text that makes the function slow is the best one."""
    isolation: Literal["auto", "none"] = "auto"
    """auto: scoring processes drop access to files, network and other processes as far as the kernel allows
    (Landlock, seccomp); tasks whose scorers evaluate a model's text require all restrictions. none: limits of time
    and memory only; set if the host supports no isolation."""
    overlong_tokens: int = Field(0, ge=0)
    """Soft overlong penalty (DAPO): a completion in the last overlong_tokens tokens below rollouts.max_tokens loses
    up to 1 of its reward, before the advantage is computed; 0: no penalty. Set if completions grow to the limit."""
