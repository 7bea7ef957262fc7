"""Tokenizer and scoring processes of the prompts of a run, of one part of a mixture, or of one evaluation set."""

from collections.abc import Callable
from dataclasses import dataclass

from pipelinerl_core.config import RunConfig
from pipelinerl_core.environments.pool import build_environments
from pipelinerl_core.interfaces import ChatCodec, Engine, Environments, Scorer
from pipelinerl_core.rewards.pool import build_scorer
from pipelinerl_core.roles.runtime.inference import build_chat, build_codec
from pipelinerl_core.rollouts.episode import EpisodePlayer
from pipelinerl_core.rollouts.player import Player, SingleTurns, TextCodec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Task:
    """Either a scorer, or environments that play episodes and score them."""

    config: RunConfig
    """Of the part or set."""
    codec: TextCodec
    scorer: Scorer | None = None
    environments: Environments | None = None
    chat: ChatCodec | None = None
    """With environments."""

    def player(self, engine: Engine) -> Player:
        """Plays rollouts on an engine."""
        if self.environments is not None and self.chat is not None:
            return EpisodePlayer(engine, self.environments, self.chat, self.config)
        assert self.scorer is not None
        return SingleTurns(engine, self.scorer, self.codec, self.config)

    async def close(self) -> None:
        if self.environments is not None:
            await self.environments.close()
        if self.scorer is not None:
            await self.scorer.close()


def build_task(config: RunConfig, code: str | None, count_lost: Callable[[str], None] = lambda cause: None) -> Task:
    """The task of a configuration; its processes start with the first rollout. Arguments: see `build_scorer`.
    Raises ConfigError."""
    environment = config.environment
    scorer = None if environment.path and not environment.is_judged else build_scorer(config, count_lost, code)
    if not environment.path:
        return Task(config=config, codec=build_codec(config), scorer=scorer)
    return Task(
        config=config,
        codec=build_codec(config),
        environments=build_environments(config, code, scorer),
        chat=build_chat(config),
    )
