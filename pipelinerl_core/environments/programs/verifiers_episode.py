"""One episode of an environment of the verifiers library, as an agent program. Runs under another interpreter.

    environment process --task on stdin--> this program: Env.run_episode --chat completions--> the episode's endpoint
                                                                         --POST /reward------>

The launcher imports this file as a module, which loads the taskset that PIPELINERL_TASKSET names: a list
[id, options, harness] as JSON. The id is of a taskset that is installed for this interpreter, or of a module in the
working directory; options are keys of its taskset configuration, again as JSON; harness is the id of a harness of the
library. If harness is empty, the harness of the taskset runs, or, if the taskset has none, `ReplyHarness` in this
process. Each episode runs this file in a fork of the launcher.

Written for verifiers 0.4 (the package `verifiers.v1`). Imports nothing of this project.
"""

import asyncio
import functools
import itertools
import json
import logging
import os
import ssl
import sys
import types
from typing import Any

import httpx
import openai.resources.chat.completions  # noqa: F401  (else each episode imports it: 0.4 s)
import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.utils import loaders

OWN_HARNESS = "pipelinerl_reply"
MODEL = "policy"
NUM_INFINITE = 1000
"""Tasks of a taskset without an end; the first ones are used."""
PIPELINERL_FACTS: dict[str, int] = {}
"""The values that the launcher sends to the environment process."""
LOADED: list[Any] = []
"""The environment and the list of its tasks."""


class ReplyHarness(vf.Harness[vf.HarnessConfig]):
    """One reply of the model to the conversation, in this process: no download, no tools of the task.

    If an environment plays the user, the library launches the harness again with the conversation so far.
    """

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
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


def load(ident: str, options: str, harness: str) -> None:
    """Build the environment and load its tasks. Raises SystemExit with one line for a taskset that cannot be used."""
    try:
        env = build(ident, json.loads(options), harness)
    except ValueError as error:  # of pydantic, over several lines
        raise SystemExit(" ".join(str(error).split())) from None
    tasks = list(itertools.islice(iter(env.taskset), None if env.taskset.bounded else NUM_INFINITE))
    if len(tasks) < 2:
        raise SystemExit(f"the taskset has {len(tasks)} tasks; at least two are needed, one of them held out")
    LOADED[:] = env, tasks
    ssl.create_default_context = functools.cache(ssl.create_default_context)  # 30 ms for each of an episode's clients
    httpx.create_ssl_context()
    PIPELINERL_FACTS["tasks"] = len(tasks)


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


async def play(env: Any, task: Any) -> dict[str, Any]:
    """Play a task; returns the body for /reward. Raises SystemExit with one line without a score."""
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
    """Play the task on stdin and send its reward."""
    # Tool servers import the module of the taskset; harnesses start uv, which may be installed beside the library.
    os.environ["PYTHONPATH"] = os.getcwd()
    os.environ["PATH"] = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)))
    env, tasks = LOADED
    body = asyncio.run(play(env, tasks[json.load(sys.stdin)["index"]]))
    key = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    httpx.post(f"{os.environ['OPENAI_BASE_URL']}/reward", json=body, headers=key).raise_for_status()


if __name__ == "__main__":
    sys.modules["verifiers_episode"].main()  # the launcher has imported this file as a module
elif "PIPELINERL_TASKSET" in os.environ:
    sys.path.append(os.getcwd())
    logging.disable(logging.WARNING)
    load(*json.loads(os.environ["PIPELINERL_TASKSET"]))
