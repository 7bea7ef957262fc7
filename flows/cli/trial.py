"""`pipelinerl try`: trains on a user's rows with guessed settings."""

from typing import Annotated

import typer

from pipelinerl.flows.cli.arguments import Json, Overrides, Root

_EQUAL_STEPS = 6
"""Steps of equal rewards after which a try ends."""


def trial(
    rows: Annotated[
        str, typer.Argument(metavar="ROWS", help="A file of rows: .jsonl, .json, .csv, .tsv or .parquet.")
    ],
    reward: Annotated[
        str,
        typer.Argument(
            metavar="[FILE.py:FUNCTION]", help="The reward function. Default: compare with the answer of the row."
        ),
    ] = "",
    overrides: Overrides = None,
    root: Root = "",
    as_json: Json = False,
) -> None:
    """Train a small chat model on your rows with your reward for some minutes, with settings guessed from the rows.

    At the end print the curve of the reward, completions beside their references, and the command that writes the
    settings to a file. The model is SmolLM2-135M-Instruct; `model.path=` names another.

    Examples:

    - `pipelinerl try rows.jsonl rewards.py:score`
    - `pipelinerl try rows.jsonl trainer.steps=40` compares with the column `answer`
    """
    import shlex

    from pipelinerl.flows.cli.console import say
    from pipelinerl.flows.cli.training import carry_out, examples
    from pipelinerl_core.run.jobs import new_job
    from pipelinerl_core.tools.own_rows import PRESET, guess

    if "=" in reward:  # no reward function was given
        reward, overrides = "", [reward, *(overrides or ())]
    together = (*guess(rows, reward, overrides or ()), *(overrides or ()))
    chosen = tuple({override.partition("=")[0]: override for override in together}.values())  # the last of a key
    command = shlex.join(("pipelinerl", "init", "mine.toml", PRESET, *chosen))
    say(f"settings: {command}")
    job = new_job(PRESET, (f"trainer.equal_reward_steps={_EQUAL_STEPS}", *chosen), root)
    carry_out(job, as_json=as_json, more=lambda url: [*examples(url), f"  change             {command}"])
