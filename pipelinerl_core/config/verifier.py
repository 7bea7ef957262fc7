"""Which verifier scores which prompts: one rule, used by the prompt sources and by the scorer."""

from pipelinerl_core.config.sections import RunConfig
from pipelinerl_core.errors import ConfigError

AUTOMATIC = {
    "sums": "sums",
    "reasoning_gym": "reasoning_gym",
    "file": "exact_match",
    "huggingface": "exact_match",
}


def verifier_name(config: RunConfig) -> str:
    """Name of the run's verifier, `auto` resolved; raises ConfigError where it cannot score these prompts."""
    prompts, reward = config.prompts.kind, config.reward.kind
    if reward == "auto":
        return AUTOMATIC[prompts]
    if reward == "reasoning_gym" and prompts != "reasoning_gym":
        raise ConfigError(
            f"reward.kind=reasoning_gym scores only its own tasks, but prompts.kind={prompts}. "
            f"Set reward.kind=auto (here {AUTOMATIC[prompts]}) or prompts.kind=reasoning_gym"
        )
    return reward
