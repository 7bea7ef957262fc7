"""The kinds of environments: the keys of each `environment.kind`, and what other code asks about it.

The text below a field is its help.

To add an environment: a section here and its line in EnvironmentConfig, and a branch of build_environments in
environments/pool.py.
"""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from pipelinerl_core.config.section import Section, default_kind


class EnvironmentSection(Section):
    """Episodes of several turns, which processes of their own play and score (docs/environments.md): the keys of
    every kind."""

    key: ClassVar[str] = "path"
    """The key that names the environment in messages."""
    width_key: ClassVar[str] = "workers"
    """The key that sets how many episodes compute at once."""
    has_tasks: ClassVar[bool] = True
    """Can have tasks of its own, for prompts.kind=environment."""
    needs_own_tasks: ClassVar[bool] = False
    """Plays its own tasks only."""

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
    max_branches: int = Field(8, ge=0)
    """Branches of an episode at most: histories that do not continue the previous call's, such as a compacted history
    or a sub-agent's. Then the episode is cut as with max_turns. Each branch is trained as a sequence of its own, so
    lower it if the trainer runs out of memory."""
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

    @property
    def is_judged(self) -> bool:
        """reward.kind or reward.function scores the episodes; else the environment does."""
        return False

    @property
    def subject(self) -> str:
        """The environment in messages: its key and value."""
        value = getattr(self, self.key)
        return f"environment.{self.key}={value if isinstance(value, str) else ' '.join(value)}"


class ClassEnvironment(EnvironmentSection):
    """A class of your own."""

    kind: Literal["class"] = "class"
    """What plays the episodes. class: the class of environment.path; code: the model writes Python programs, which
    run in a sandbox and are scored by tests (docs/code.md); command: an agent program per episode, which speaks chat
    completions (docs/agents.md); verifiers: an environment of the verifiers library (docs/verifiers.md)."""
    path: str = ""
    """Class that plays the episodes: FILE.py:CLASS, package.module:CLASS, or builtin:NAME. The run stores a copy of
    the file. Empty: rollouts of one turn, scored by `reward`."""
    options: dict[str, Any] = Field({})
    """Keyword arguments of the class. Example: environment.options.limit=50."""


class CodeEnvironment(EnvironmentSection):
    """The model writes Python programs, which are scored by tests (docs/code.md)."""

    kind: Literal["code"] = "code"
    path: Literal["builtin:code"] = "builtin:code"
    options: dict[str, Any] = Field({})


class ProgramEnvironment(EnvironmentSection):
    """The keys of environments that run a program per episode."""

    width_key: ClassVar = "programs"

    programs: int = Field(16, ge=1)
    """Programs that run at once, per actor. Lower if the programs use up the cores; raise if the slots of the engine
    stay empty."""


class CommandEnvironment(ProgramEnvironment):
    """An agent program per episode, which speaks chat completions (docs/agents.md)."""

    key: ClassVar = "command"
    has_tasks: ClassVar = False

    kind: Literal["command"] = "command"
    path: Literal["builtin:command"] = "builtin:command"
    command: tuple[str, ...] = Field(min_length=1)
    """The program and its arguments, for example ["python", "agent.py", "{prompt}"]. The name of a column in braces
    becomes the column of the task's row. The task is on stdin as JSON."""
    preload: tuple[str, ...] = ()
    """Python modules that the interpreter of the command imports once per environment process, for example
    ["openai"]; each episode then runs the command's Python file in a fork. Saves the time of the imports."""
    reward: Literal["answer", "stdout", "posted"] = "answer"
    """What is scored. answer, stdout: reward.kind or reward.function scores the last answer of the model, or what the
    program has printed; posted: the program sends its reward to the endpoint."""

    @property
    def is_judged(self) -> bool:
        return self.reward != "posted"

    @model_validator(mode="after")
    def _preloads_python(self) -> Self:
        if self.preload and (len(self.command) < 2 or not self.command[1].endswith(".py")):
            raise ValueError(
                "environment.preload is for a command that runs a Python file. Set environment.command to "
                '["python", "FILE.py", ...], or remove environment.preload'
            )
        return self


class VerifiersEnvironment(ProgramEnvironment):
    """An environment of the verifiers library (docs/verifiers.md)."""

    key: ClassVar = "id"
    needs_own_tasks: ClassVar = True

    kind: Literal["verifiers"] = "verifiers"
    path: Literal["builtin:verifiers"] = "builtin:verifiers"
    id: str = Field(min_length=1)
    """Name of an installed taskset, or of a module in the working directory."""
    python: str = ".venv-verifiers/bin/python"
    """The interpreter that has the library and the environment installed."""
    harness: str = ""
    """A harness of the library, for example null; empty: the harness of the taskset, or one reply in the same
    process."""
    options: dict[str, Any] = Field({})


EnvironmentConfig = Annotated[
    ClassEnvironment | CodeEnvironment | CommandEnvironment | VerifiersEnvironment,
    Field(discriminator="kind"),
    BeforeValidator(default_kind("class")),
]
