"""One episode of an environment of the verifiers library, as an agent program. Runs under another interpreter.

    PYTHON verifiers_episode.py ID OPTIONS HARNESS [--count]

    environment process --task on stdin--> this program: Env.run_episode --chat completions--> the episode's endpoint
                                                                         --POST /reward------>

ID names a taskset that is installed for PYTHON, or a module in the working directory. OPTIONS: keys of its taskset
configuration, as JSON. HARNESS: a harness of the library; empty: the harness of the taskset, or, if the taskset has
none, one reply in this process, which needs no download and has no tools. With --count the program prints the number
of tasks, or "infinite".

Written for verifiers 0.4 (the package `verifiers.v1`). Imports nothing of this project.
"""

import asyncio
import itertools
import json
import logging
import os
import sys
import types
from typing import Any

import httpx
import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.utils import loaders

OWN_HARNESS = "pipelinerl_reply"
MODEL = "policy"


class ReplyHarness(vf.Harness[vf.HarnessConfig]):
    """One reply of the model to the prompt of the task, in this process."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any, **_: Any
    ) -> Any:
        """Ask once. The session that verifiers serves on `endpoint` keeps the trace."""
        if mcp_urls:
            raise RuntimeError("the tasks have tools: set environment.harness to a harness that calls tools")
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            answer = await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(exit_code=0, stdout=answer.choices[0].message.content or "", stderr="")


def build(ident: str, options: dict[str, Any], harness: str) -> Any:
    """The environment. The harness of this file is found under its name as if it were an installed module."""
    own = types.ModuleType(OWN_HARNESS)
    own.ReplyHarness = ReplyHarness  # type: ignore[attr-defined]
    own.__all__ = ["ReplyHarness"]  # type: ignore[attr-defined]
    sys.modules[OWN_HARNESS] = own
    chosen = harness or loaders.default_harness_id(ident)
    if not harness and chosen in loaders.builtin_harness_ids():  # the taskset has no harness of its own
        chosen = OWN_HARNESS
    kind, config_class = loaders.environment_class(ident), loaders.env_config_type(ident)
    seats = [name for name, field in config_class.model_fields.items() if field.annotation is vf.AgentConfig]
    seat = {"harness": {"id": chosen}, "runtime": {"type": "subprocess"}}
    values = {"taskset": {**options, "id": ident}, **dict.fromkeys(seats, seat)}
    return kind(config_class.model_validate(values))


async def play(env: Any, index: int) -> dict[str, Any]:
    """Play the task at a position; returns the body for /reward. Raises SystemExit with one line without a score."""
    task = next(itertools.islice(iter(env.taskset), index, None), None)
    if task is None:
        raise SystemExit(f"the taskset has no task {index}")
    client = EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with env.serving():
        episode = await env.run_episode(task, ModelContext(model=MODEL, client=client))
    for error in [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]:
        raise SystemExit(f"{error.type}: {' '.join(str(error.message).split())}")
    if len(episode.traces) != 1:
        raise SystemExit(f"the episode has {len(episode.traces)} conversations; one can be trained")
    (trace,) = episode.traces
    if not trace.rewards:
        raise SystemExit("the task has no reward")
    unknown = [name for name, reward in trace.rewards.items() if reward is None]
    if unknown:  # for example after a deadline of the scoring; the library counts 0
        raise SystemExit(f"no score for {', '.join(unknown)}")
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    scores = {name: reward.score for name, reward in trace.rewards.items()}
    return {"reward": trace.reward, "components": {**metrics, **scores}}


def main() -> None:
    """Count the tasks, or play the task on stdin and send its reward."""
    sys.path.append(os.getcwd())
    logging.disable(logging.WARNING)
    ident, options, harness, *flags = sys.argv[1:]
    env = build(ident, json.loads(options), harness)
    if flags == ["--count"]:
        print(sum(1 for _ in env.taskset) if env.taskset.bounded else "infinite")  # noqa: T201
        return
    body = asyncio.run(play(env, json.load(sys.stdin)["index"]))
    key = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    httpx.post(f"{os.environ['OPENAI_BASE_URL']}/reward", json=body, headers=key).raise_for_status()


if __name__ == "__main__":
    main()
