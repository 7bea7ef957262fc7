"""Sections of verifiers, reward functions and environments; the text below a field is its help."""

from typing import Any, Literal

from pydantic import Field, TypeAdapter, model_validator

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
    The run stores a copy of the file."""
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
    """Seconds that scoring one completion may take; then the scoring process is killed and the completion counts as a
    wrong answer. Raise for slow verifiers."""
    isolation: Literal["auto", "none"] = "auto"
    """auto: scoring processes drop access to files, network and other processes as far as the kernel allows
    (Landlock, seccomp); tasks whose scorers evaluate a model's text require all restrictions. none: limits of time
    and memory only; set if the host supports no isolation."""
    overlong_tokens: int = Field(0, ge=0)
    """Soft overlong penalty (DAPO): a completion in the last overlong_tokens tokens below rollouts.max_tokens loses
    up to 1 of its reward, before the advantage is computed; 0: no penalty. Set if completions grow to the limit."""


class EnvironmentConfig(Section):
    """Episodes of several turns: a class of your own plays and scores them in processes of its own
    (docs/environments.md)."""

    kind: Literal["class", "code", "command", "verifiers"] = "class"
    """What plays the episodes. class: the class of environment.path; code: the model writes Python programs, which
    run in a sandbox and are scored by tests (docs/code.md); command: an agent program per episode, which speaks chat
    completions (docs/agents.md); verifiers: an environment of the verifiers library (docs/verifiers.md)."""
    path: str = ""
    """Class that plays the episodes: FILE.py:CLASS, package.module:CLASS, or builtin:NAME. The run stores a copy of
    the file. Empty: rollouts of one turn, scored by `reward`."""
    options: dict[str, Any] = Field({})
    """Keyword arguments of the class. Example: environment.options.limit=50."""
    command: tuple[str, ...] = ()
    """kind=command: the program and its arguments, for example ["python", "agent.py", "{prompt}"]. The name of a
    column in braces becomes the column of the task's row. The task is on stdin as JSON."""
    preload: tuple[str, ...] = ()
    """kind=command: Python modules that the interpreter of the command imports once per environment process, for
    example ["openai"]; each episode then runs the command's Python file in a fork. Saves the time of the imports."""
    programs: int = Field(16, ge=1)
    """kind=command: programs that run at once, per actor. Lower if the programs use up the cores; raise if the slots
    of the engine stay empty."""
    id: str = ""
    """kind=verifiers: name of an installed taskset, or of a module in the working directory."""
    python: str = ".venv-verifiers/bin/python"
    """kind=verifiers: the interpreter that has the library and the environment installed."""
    harness: str = ""
    """kind=verifiers: a harness of the library, for example null; empty: the harness of the taskset, or one reply in
    the same process."""
    reward: Literal["answer", "stdout", "posted"] = "answer"
    """kind=command: what is scored. answer, stdout: reward.kind or reward.function scores the last answer of the
    model, or what the program has printed; posted: the program sends its reward to the endpoint."""
    workers: int = Field(1, ge=1)
    """Environment processes per actor; each plays many episodes at once on one core. Raise if the environments
    compute for longer than the model."""
    call_seconds: float = Field(30, gt=0)
    """Seconds that the environment may take between a turn of the model and its next message; then the episode ends
    with timeout_reward. Raise for slow environments."""
    episode_seconds: float = Field(600, gt=0)
    """Seconds that the environment may take during one episode, without the time of the model; then the episode ends
    with timeout_reward."""
    timeout_reward: float = Field(0.0, ge=-1e9, le=1e9)
    """Reward of an episode whose environment takes more than call_seconds or episode_seconds, so that a policy does
    not gain by making the environment hang. Such episodes also count in the rule of 20 % errors. Set below the lowest
    reward of the environment if that is negative."""
    max_turns: int = Field(32, ge=1)
    """Turns of the model per episode at most; then the episode is cut and has reward 0, unless the class handles
    BudgetSpent."""
    turn_tokens: int = Field(0, ge=0)
    """Tokens of one turn at most; 0: no limit below rollouts.max_tokens, which limits the whole episode. Set if one
    turn must not use up the tokens of the episode."""
    network: bool = False
    """The environment may open network connections and start threads. Set if it calls a service."""
    variables: tuple[str, ...] = ()
    """Names of environment variables that the environment may read, for example ["SEARCH_KEY"]; set the variables on
    every host that runs actors. Values are not stored."""
    isolation: Literal["auto", "none"] = "auto"
    """auto: environment processes drop access to files, network and other processes as far as the kernel allows
    (Landlock, seccomp). none: limits of time and memory only; set if the host supports no isolation, or if the
    environment starts programs. With kind=command or verifiers, auto separates each program from other processes, and
    none does not (docs/security.md)."""

    @model_validator(mode="before")
    @classmethod
    def _path_of_kind(cls, given: Any) -> Any:
        """Kinds other than class get a path too, because an empty path means that there is no environment."""
        kind = given.get("kind", "class") if isinstance(given, dict) else "class"
        return given if kind == "class" or given.get("path") else {**given, "path": f"builtin:{kind}"}

    @property
    def is_judged(self) -> bool:
        """reward.kind or reward.function scores the episodes; else the environment does."""
        return self.kind == "command" and self.reward != "posted"


ENVIRONMENT: TypeAdapter[EnvironmentConfig] = TypeAdapter(EnvironmentConfig)
