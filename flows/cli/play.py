"""`pipelinerl play`: plays one episode of an environment without a model."""

from typing import Annotated

import typer

from pipelinerl.flows.cli.arguments import Json, Overrides, complete_preset


def play(
    source: Annotated[
        str, typer.Argument(metavar="[PRESET|FILE.toml]", help="The settings.", autocompletion=complete_preset)
    ],
    overrides: Overrides = None,
    answers: Annotated[
        str,
        typer.Option(
            metavar="FILE.jsonl",
            help="The model's turns, one per line: a JSON string, or an object with content and tool_calls. Default: "
            "you write them.",
        ),
    ] = "",
    index: Annotated[int, typer.Option(min=0, help="Position of the task.")] = 0,
    as_json: Json = False,
) -> None:
    """Play one episode of an environment or agent program, and show its messages, tool calls and reward.

    No model is needed: a file or you write its turns. The end of the file, or Ctrl-D, means that no
    token is left. A tool call in a text is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

    Examples:

    - `pipelinerl play quickstart environment.path=builtin:guess prompts.kind=environment`
    - `pipelinerl play mine.toml --answers turns.jsonl --json`
    """
    import asyncio
    import signal
    import sys

    from pipelinerl.flows.cli.console import answer, say
    from pipelinerl_core.models.resolve import load_config
    from pipelinerl_core.tools import play_episode

    config = load_config(source, overrides or ())
    turns = iter(play_episode.read_turns(answers)) if answers else None

    def next_turn() -> str | None:
        if turns is not None:
            return next(turns, None)
        sys.stderr.write("you are the model> ")
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # asyncio's waits for the end of the line
        line = sys.stdin.readline()
        return line.removesuffix("\n") if line else None

    result = asyncio.run(play_episode.play(config, index, next_turn, say))
    parts = [f"  {name:<18} {value:g}" for name, value in result["components"].items()]
    by_turn = ", ".join(f"{reward:g}" for reward in result["turn_rewards"])
    lines = [f"reward {result['reward']:g}{' (cut)' if result['cut'] else ''}", *parts]
    answer(result, [*lines, *([f"  by turn            {by_turn}"] if by_turn else [])], as_json=as_json)
