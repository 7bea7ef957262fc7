"""Choice of the verifier for the run's prompts, used by the prompt sources and by the scorer."""

from pathlib import Path

from pipelinerl_core.config.run import RunConfig
from pipelinerl_core.errors import ConfigError


def verifier_name(config: RunConfig) -> str:
    """Name of the run's verifier or environment, `auto` resolved; raises ConfigError if the verifier cannot score
    these prompts."""
    if own := _scoring_environment(config) or config.reward.function:
        return Path(own).name
    prompts, reward = config.prompts, config.reward.kind
    if reward == "auto":
        return prompts.verifier
    if reward == "reasoning_gym" and prompts.verifier != reward:
        raise ConfigError(
            f"reward.kind=reasoning_gym scores only reasoning-gym tasks, but prompts.kind={prompts.kind}. "
            f"Set reward.kind=auto (here {prompts.verifier}) or prompts.kind=reasoning_gym"
        )
    return reward


def scored_by(config: RunConfig) -> tuple[str, str]:
    """(key, location) of the user's function or environment that scores the rollouts; the location is empty without
    it."""
    if own := _scoring_environment(config):
        return "environment.path", own
    return "reward.function", config.reward.function


def _scoring_environment(config: RunConfig) -> str:
    """environment.path, if the environment scores its episodes itself."""
    return "" if config.environment.is_judged else config.environment.path
