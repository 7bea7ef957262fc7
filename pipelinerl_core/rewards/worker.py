"""The process that runs one verifier: JSON lines in, JSON lines out, one scoring at a time.

in   {...}                                  once: fields of ChildSpec
out  {"ready": true}                        once, when the verifier is loaded and the process is sealed; or
out  {"failed": "NameError: name 'x' is not defined (mine.py:3)"}     and the process ends
in   {"id": 7, "text": "7,15.15", "task": {"answer": "15"}}
out  {"id": 7, "reward": 1.0}
out  {"id": 8, "reward": 0.0, "lost": "timeout"}    an evaluation exceeded its deadline
out  {"id": 9, "error": "KeyError: 'answer' (verifiers.py:23)", "raised": true}
out  {"id": 10, "reward": 1.5, "components": {"correct": 1.0, "short": 0.5}}

The text is untrusted. A verifier that compares runs in this process. A verifier that evaluates returns an Evaluation,
which runs in a fork (forked.py), so that side effects end with the fork. The process ends when its input closes, and
the kernel kills the process when its parent dies.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from pipelinerl_core.rewards import forked
from pipelinerl_core.rewards.verifiers import Components, Evaluation, Verifier
from pipelinerl_core.sandbox import isolation
from pipelinerl_core.sandbox.child_process import as_line, begin_child, write_all
from pipelinerl_core.sandbox.user_code import Invalid, failure_line, finite_or_none


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """Verifier and limits of a scoring child."""

    name: str
    """Name of the verifier, for messages."""
    function: str
    """module:function of the verifier."""
    timeout_seconds: float
    """Limit of one scoring, from the time when the child starts the scoring."""
    memory_bytes: int
    """Limit of the child's address space."""
    timeout_reward: float = 0.0
    """Reward of a scoring over its limit."""
    prepare: Any = None
    """JSON argument of a verifier that is a class, or of the function `prepare` in the verifier's module; None: do
    not call `prepare`."""
    is_users: bool = False
    """The verifier is a user's function, which gets the prompt's text and the completion's tokens too."""
    is_sealed: bool = True
    """Drop access to files, network and processes before the first scoring, as far as the kernel allows."""
    network: bool = False
    """A sealed process may open connections."""
    environment: tuple[str, ...] = ()
    """Further variables of the actor's environment that the child gets."""
    forks: bool = False
    """The verifier may return Evaluations, which run in forks of the child."""


def main() -> None:
    """Load the verifier, seal the process, answer requests."""
    requests, replies, fields = begin_child()
    spec = ChildSpec(**fields)
    try:
        verifier, warm_up = _loaded(spec.function, spec.prepare)
        memory_bytes = min(spec.memory_bytes, isolation.address_space_bytes() + isolation.EVALUATION_BYTES)
        evaluator = forked.Evaluator(
            lambda line: _evaluation(verifier, line), warm_up, seconds=spec.timeout_seconds, memory_bytes=memory_bytes
        )
        if spec.is_sealed:
            isolation.seal("reward.isolation", forks=spec.forks, network=spec.network)
    except BaseException as error:  # noqa: BLE001  (a user's module raises anything, also SystemExit)
        write_all(replies, as_line({"failed": failure_line(error)}))
        return
    write_all(replies, as_line({"ready": True}))
    if spec.forks:
        evaluator.start_next()
    with open(requests, "rb") as stream:
        for line in stream:
            reply = as_line(_reply(verifier, line, evaluator, spec.timeout_reward))
            write_all(replies, reply)  # unbuffered: resets the parent's deadline
            if spec.forks:
                evaluator.start_next()


def _loaded(location: str, prepare: Any) -> tuple[Verifier, Callable[[], object]]:
    """The verifier, and the function that a fork calls before its request arrives."""
    module_name, _, function = location.partition(":")
    module = import_module(module_name)
    if isinstance(verifier := getattr(module, function), type):  # a verifier that is built for the run
        return verifier(prepare), lambda: None
    warm_up = module.prepare(prepare) if prepare is not None else lambda: None
    return verifier, warm_up


def _reply(verifier: Verifier, line: bytes, evaluator: forked.Evaluator, timeout_reward: float) -> dict[str, Any]:
    request = json.loads(line)
    file = getattr(verifier, "file", "")
    caught = _caught(lambda: _scored(verifier, request, line, evaluator, timeout_reward), BaseException, file)
    return {"id": request["id"], **caught}


def _scored(
    verifier: Verifier, request: dict[str, Any], line: bytes, evaluator: forked.Evaluator, timeout_reward: float
) -> dict[str, Any]:
    verdict = verifier(request["text"], request["task"])
    if isinstance(verdict, Components):
        return {"reward": verdict.reward, "components": verdict.values}
    if not isinstance(verdict, Evaluation):
        return {"reward": verdict}
    try:
        result = evaluator.evaluated(line)
    except forked.Lost as lost:
        is_late = str(lost) == forked.TIMEOUT
        return {"reward": timeout_reward if is_late else verdict.lowest, "lost": str(lost)}
    if "reward" in result and not verdict.lowest <= result["reward"] <= verdict.highest:
        return {"reward": verdict.lowest, "lost": forked.DIED}
    return result


def _evaluation(verifier: Verifier, line: bytes) -> dict[str, Any]:
    """Evaluate the text of a request whose verdict is an Evaluation; called in a fork."""
    request = json.loads(line)

    def scored() -> dict[str, Any]:
        verdict = verifier(request["text"], request["task"])
        return {"reward": verdict.score() if isinstance(verdict, Evaluation) else verdict}

    return _caught(scored, Exception)  # a text that exits ends the fork, and has no result


def _caught(scored: Callable[[], dict[str, Any]], failures: type[BaseException], file: str = "") -> dict[str, Any]:
    """The result with its reward as a float, or the failure."""
    try:
        result = scored()
        reward = finite_or_none(result.get("reward", 0.0))
    except failures as error:  # the boundary: whatever a verifier raises is data
        return {"error": failure_line(error, file), **({} if isinstance(error, Invalid) else {"raised": True})}
    if reward is None:
        return {"error": "the reward is not a finite number"}
    return {**result, "reward": reward} if "reward" in result else result


if __name__ == "__main__":
    main()
