"""Check a reward function with the first training prompt, in a scoring process.

stdin: {"config": ..., "code": text of its file or null} (check_process.py); the lines are warnings.
"""

import asyncio
import re
import sys
from typing import Any

from pipelinerl_core.check_process import run_check
from pipelinerl_core.config.run import RunConfig
from pipelinerl_core.errors import ConfigError, FunctionRaised, RewardError
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.prompts import build_source
from pipelinerl_core.rewards.pool import build_scorer
from pipelinerl_core.types import Prompt


async def check(config: RunConfig, prompt: Prompt, code: str | None) -> list[str]:
    """Score the reference answer and an empty completion; returns warnings. Raises ConfigError."""
    subject = f"reward.function={config.reward.function}"
    warnings: list[str] = []
    scorer = build_scorer(
        config,
        lambda cause: warnings.append(
            f"{subject}: a trial call took more than reward.timeout_seconds={config.reward.timeout_seconds:g}"
        ),
        code,
    )
    answer = prompt.task.get("answer")
    try:
        for text in dict.fromkeys(("" if answer is None else str(answer), "")):
            try:
                await scorer.score(prompt, text)
            except FunctionRaised as error:
                warnings.append(
                    f"{subject}: a trial call with the completion {text[:40]!r} raised {_reason(error)}. Rollouts "
                    f"with such errors have no reward and are not trained{_hint(config, error)}"
                )
            except RewardError as error:
                raise ConfigError(f"{subject}: {_reason(error)}") from None
    finally:
        await scorer.close()
    return warnings


_HINTS = (
    (r"can't start new thread", "The function may start no threads, unless reward.network=true"),
    (r"Permission denied: '", "Read files outside of the function, where the file is loaded"),
    (r"not permitted: '|usable temporary directory", "The function may write no files; keep the data in memory"),
    (r"KeyError", "If the function needs a variable, name it in reward.environment"),
)
"""(pattern of an error, the change that allows the call)."""
_REFUSED = "The function may start no processes; programs belong into an environment (environment.kind=command)"


def _hint(config: RunConfig, error: RewardError) -> str:
    """The change that allows a call which the isolation has refused; empty for other errors."""
    text = str(error)
    for pattern, hint in _HINTS:
        if re.search(pattern, text):
            return f". {hint}"
    if "Operation not permitted" in text:
        return f". {_REFUSED}" + ("" if config.reward.network else ". For connections set reward.network=true")
    return ""


def _reason(error: RewardError) -> str:
    """The message without the name of the verifier, `verifier FILE.py:FUNCTION: `."""
    return str(error).split(": ", 1)[1]


def _check(given: Any) -> list[str]:
    config = build_config(given["config"])
    return asyncio.run(check(config, build_source(config).prompt(0), given["code"]))


if __name__ == "__main__":
    sys.exit(run_check(_check))
