"""Environment processes with a scripted host: answers asks from a list."""

import asyncio

import psutil

from pipelinerl_core.environments.pool import build_environments
from pipelinerl_core.errors import EnvironmentFailed
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.types import Reply

LIMIT_SECONDS = 120


class ScriptedHost:
    """The actor's side of one episode: the texts of the model's turns in order, then the budget is used up."""

    def __init__(self, *texts, hold=None):
        """hold: an event that each turn waits for."""
        self.texts = texts
        self.hold = hold
        self.once = {}
        self.tasks = []
        self.asked = []
        self.followed = []
        self.is_asked = asyncio.Event()
        self.restarts = 0
        self.is_restarted = asyncio.Event()
        self._turn = 0

    async def ask(self, messages, tools, after):
        self.asked.append((list(messages), list(tools)))
        self.followed.append(after)
        self.is_asked.set()
        if self.hold is not None:
            await self.hold.wait()
        turn, self._turn = self._turn, self._turn + 1
        if turn >= len(self.texts):
            return None
        text = self.texts[turn]
        return text if isinstance(text, Reply) else Reply(text=text, content=text, num_tokens=len(text))

    def describe(self, task):
        self.tasks.append(task)

    def record(self, key, value):
        self.once[key] = value

    def restart(self):
        self.restarts += 1
        self.is_restarted.set()
        self._turn = 0


def configured(path, *overrides):
    return load_config("quickstart", [*([f"environment.path={path}"] if path else []), *overrides])


def run(code, work, *overrides, path="my_env.py:Env"):
    """The result of `work`, an async function of the pool; no process of the pool is left afterwards."""
    before = set(psutil.Process().children(recursive=True))

    async def main():
        pool = build_environments(configured(path, *overrides), code)
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                return await work(pool)
        finally:
            await pool.close()

    result = asyncio.run(main())
    assert set(psutil.Process().children(recursive=True)) == before
    return result


def played(code, *hosts, task=None, tasks=(), overrides=(), path="my_env.py:Env"):
    """Results of episodes that are played at the same time, or the texts of their errors. task: of every episode."""
    tasks = tasks or [task] * len(hosts)

    async def work(pool):
        calls = (pool.play(episode_task, 11, host) for episode_task, host in zip(tasks, hosts, strict=True))
        return await asyncio.gather(*calls, return_exceptions=True)

    results = run(code, work, *overrides, path=path)
    for result in results:
        if isinstance(result, Exception) and not isinstance(result, EnvironmentFailed):
            raise result
    return [str(result) if isinstance(result, EnvironmentFailed) else result for result in results]
