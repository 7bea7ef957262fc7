"""The tasks of an environment as prompts: a prompt holds the position of a task, not the task."""

from pipelinerl_core.config.run import RunConfig
from pipelinerl_core.config.verifier import verifier_name
from pipelinerl_core.prompts.split import prompt_id
from pipelinerl_core.types import Prompt

NAME = "environment"


def build(config: RunConfig) -> "EnvironmentSource":
    """The source of a configuration."""
    return EnvironmentSource(verifier_name(config))


class EnvironmentSource:
    """Positions 0, 1, 2, ... of the method `task`, and of the list that `held_out` returns."""

    name = NAME

    def __init__(self, env: str) -> None:
        self._env = env

    def prompt(self, index: int) -> Prompt:
        """The task at a position of the training sequence."""
        return self._prompt(f"task {index}", {"index": index})

    def held_out(self, count: int) -> list[Prompt]:
        """`count` held-out tasks. The environment may have fewer; `tools/check_environment.py` finds out."""
        return [self._prompt(f"held-out task {index}", {"held_out": index, "of": count}) for index in range(count)]

    def _prompt(self, text: str, task: dict[str, int]) -> Prompt:
        identity = prompt_id(f"{NAME} {self._env}", text)
        return Prompt(prompt_id=identity, source=NAME, env=self._env, text=text, task=dict(task))
