"""The process that runs one verifier: JSON lines in, JSON lines out, one scoring at a time.

in   {"id": 7, "text": "7,15.15", "task": {"answer": "15"}}
out  {"ready": true}                        once, when the verifier is loaded and the process is sealed
out  {"id": 7, "reward": 1.0}
out  {"id": 8, "reward": 0.0, "lost": "timeout"}    an evaluation that did not end in time
out  {"id": 9, "error": "KeyError: 'answer' (verifiers.py:23)"}

The text is a model's. A verifier that compares runs here; one that evaluates returns an Evaluation, which runs in a
fork (forked.py), so that it changes nothing here. The process ends when its input closes, and at once when its parent
dies, whatever the verifier is doing.
"""

import argparse
import json
import math
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any

from pipelinerl_core.parent_death import die_with_parent
from pipelinerl_core.rewards import forked, isolation
from pipelinerl_core.rewards.verifiers import Evaluation, Verifier


def main() -> None:
    """Load the verifier, seal the process, serve."""
    arguments = _arguments()
    die_with_parent(arguments.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole terminal; the parent decides
    replies = _claim_stdout()
    resource.setrlimit(resource.RLIMIT_AS, (arguments.memory_bytes, arguments.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    verifier, rehearse = _loaded(arguments.verifier, json.loads(arguments.prepare))
    limits = forked.Limits(
        seconds=arguments.timeout_seconds,
        memory_bytes=min(arguments.memory_bytes, isolation.address_space_bytes() + isolation.EVALUATION_BYTES),
        null=os.open(os.devnull, os.O_RDWR),
    )
    evaluator = forked.Evaluator(lambda line: _evaluation(verifier, line), rehearse, limits)
    if arguments.seal:
        isolation.seal(isolation.Policy(forks=arguments.forks))
    forked.write_all(replies, b'{"ready":true}\n')
    if arguments.forks:
        evaluator.start_next()
    for line in sys.stdin.buffer:
        reply = _reply(verifier, line, evaluator)
        forked.write_all(replies, json.dumps(reply).encode() + b"\n")  # at once: it tells the parent's clock
        if arguments.forks:
            evaluator.start_next()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verifier", required=True, help="module:function")
    parser.add_argument("--prepare", required=True, help="JSON, for the function `prepare` of the module; null: none")
    parser.add_argument("--timeout-seconds", type=float, required=True, help="limit of one evaluation")
    parser.add_argument("--memory-bytes", type=int, required=True, help="limit of the address space")
    parser.add_argument("--parent", type=int, required=True, help="process id of the parent")
    parser.add_argument("--seal", action="store_true", help="give up what a verifier does not need")
    parser.add_argument("--forks", action="store_true", help="the verifier evaluates")
    return parser.parse_args()


def _loaded(place: str, prepare: Any) -> tuple[Verifier, Callable[[], object]]:
    """The verifier, and what a fork does before its text comes."""
    module_name, _, function = place.partition(":")
    module = import_module(module_name)
    rehearse = module.prepare(prepare) if prepare is not None else lambda: None
    return getattr(module, function), rehearse


def _reply(verifier: Verifier, line: bytes, evaluator: forked.Evaluator) -> dict[str, Any]:
    request = json.loads(line)
    return {"id": request["id"], **_caught(lambda: _scored(verifier, request, line, evaluator))}


def _scored(verifier: Verifier, request: dict[str, Any], line: bytes, evaluator: forked.Evaluator) -> dict[str, Any]:
    verdict = verifier(request["text"], request["task"])
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
    """In a fork: evaluate the text of a request whose verdict is an Evaluation."""
    request = json.loads(line)

    def scored() -> dict[str, Any]:
        verdict = verifier(request["text"], request["task"])
        return {"reward": verdict.score() if isinstance(verdict, Evaluation) else verdict}

    return _caught(scored)


def _caught(scored: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result, its reward as a float; or, as words, why there is none."""
    try:
        result = scored()
    except Exception as error:  # noqa: BLE001  (the boundary: whatever a verifier raises is data)
        return {"error": _one_line(error)}
    if "reward" in result and not math.isfinite(reward := float(result["reward"])):
        return {"error": f"the reward is {reward}, not a finite number"}
    return {**result, "reward": float(result["reward"])} if "reward" in result else result


def _one_line(error: Exception) -> str:
    """Type, first line of the message and innermost place of an exception."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    message = (str(error).splitlines() or [""])[0][:200]
    return f"{type(error).__name__}: {message} ({os.path.basename(place.filename)}:{place.lineno})"


def _claim_stdout() -> int:
    """A private descriptor for the replies; what a verifier prints goes to stderr."""
    replies = os.dup(1)
    os.dup2(2, 1)
    return replies


if __name__ == "__main__":
    main()
