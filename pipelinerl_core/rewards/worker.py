"""The process that runs one verifier: JSON lines in, JSON lines out, one scoring at a time.

in   null                                   once: the argument that prepares the verifier
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

import argparse
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from pipelinerl_core.parent_death import die_with_parent
from pipelinerl_core.rewards import forked
from pipelinerl_core.rewards.verifiers import Components, Evaluation, Verifier
from pipelinerl_core.sandbox import isolation
from pipelinerl_core.sandbox.child_process import claim_stdout, write_all
from pipelinerl_core.sandbox.user_code import Invalid, failure_line, finite_or_none


def main() -> None:
    """Load the verifier, seal the process, answer requests."""
    arguments = _arguments()
    die_with_parent(arguments.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends Ctrl-C to all processes; the parent handles it
    replies = claim_stdout()
    resource.setrlimit(resource.RLIMIT_AS, (arguments.memory_bytes, arguments.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        verifier, warm_up = _loaded(arguments.verifier, json.loads(sys.stdin.buffer.readline()))
    except Exception as error:  # noqa: BLE001  (a user's module raises anything)
        _refuse(replies, error)
        return
    limits = forked.Limits(
        seconds=arguments.timeout_seconds,
        memory_bytes=min(arguments.memory_bytes, isolation.address_space_bytes() + isolation.EVALUATION_BYTES),
        null=os.open(os.devnull, os.O_RDWR),
    )
    evaluator = forked.Evaluator(lambda line: _evaluation(verifier, line), warm_up, limits)
    try:
        if arguments.seal:
            isolation.seal(isolation.Policy(forks=arguments.forks, network=arguments.network))
    except RuntimeError as error:  # a module that the verifier imports has started threads
        _refuse(replies, error)
        return
    write_all(replies, b'{"ready":true}\n')
    if arguments.forks:
        evaluator.start_next()
    for line in sys.stdin.buffer:
        reply = _reply(verifier, line, evaluator)
        write_all(replies, json.dumps(reply).encode() + b"\n")  # unbuffered: resets the parent's deadline
        if arguments.forks:
            evaluator.start_next()


def _refuse(replies: int, error: Exception) -> None:
    """Tell the parent why the verifier cannot be used."""
    write_all(replies, json.dumps({"failed": failure_line(error)}).encode() + b"\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verifier", required=True, help="module:function")
    parser.add_argument("--timeout-seconds", type=float, required=True, help="limit of one evaluation")
    parser.add_argument("--memory-bytes", type=int, required=True, help="limit of the address space")
    parser.add_argument("--parent", type=int, required=True, help="process id of the parent")
    parser.add_argument("--seal", action="store_true", help="drop all permissions that a verifier does not need")
    parser.add_argument("--forks", action="store_true", help="the verifier evaluates")
    parser.add_argument("--network", action="store_true", help="the verifier opens connections")
    return parser.parse_args()


def _loaded(location: str, prepare: Any) -> tuple[Verifier, Callable[[], object]]:
    """The verifier, and the function that a fork calls before its request arrives."""
    module_name, _, function = location.partition(":")
    module = import_module(module_name)
    if isinstance(verifier := getattr(module, function), type):  # a verifier that is built for the run
        return verifier(prepare), lambda: None
    warm_up = module.prepare(prepare) if prepare is not None else lambda: None
    return verifier, warm_up


def _reply(verifier: Verifier, line: bytes, evaluator: forked.Evaluator) -> dict[str, Any]:
    request = json.loads(line)
    caught = _caught(lambda: _scored(verifier, request, line, evaluator), getattr(verifier, "file", ""))
    return {"id": request["id"], **caught}


def _scored(verifier: Verifier, request: dict[str, Any], line: bytes, evaluator: forked.Evaluator) -> dict[str, Any]:
    verdict = verifier(request["text"], request["task"])
    if isinstance(verdict, Components):
        return {"reward": verdict.reward, "components": verdict.values}
    if not isinstance(verdict, Evaluation):
        return {"reward": verdict}
    try:
        result = evaluator.evaluated(line)
    except forked.Lost as lost:
        return {"reward": verdict.lowest, "lost": str(lost)}
    if "reward" in result and not verdict.lowest <= result["reward"] <= verdict.highest:
        return {"reward": verdict.lowest, "lost": forked.DIED}
    return result


def _evaluation(verifier: Verifier, line: bytes) -> dict[str, Any]:
    """Evaluate the text of a request whose verdict is an Evaluation; called in a fork."""
    request = json.loads(line)

    def scored() -> dict[str, Any]:
        verdict = verifier(request["text"], request["task"])
        return {"reward": verdict.score() if isinstance(verdict, Evaluation) else verdict}

    return _caught(scored)


def _caught(scored: Callable[[], dict[str, Any]], file: str = "") -> dict[str, Any]:
    """The result with its reward as a float, or the failure."""
    try:
        result = scored()
        reward = finite_or_none(result.get("reward", 0.0))
    except Exception as error:  # noqa: BLE001  (the boundary: whatever a verifier raises is data)
        return {"error": failure_line(error, file), **({} if isinstance(error, Invalid) else {"raised": True})}
    if reward is None:
        return {"error": "the reward is not a finite number"}
    return {**result, "reward": reward} if "reward" in result else result


if __name__ == "__main__":
    main()
