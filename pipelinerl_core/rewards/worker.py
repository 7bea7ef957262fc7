"""The child process that runs one verifier: JSON lines in, JSON lines out, one scoring at a time.

in   {"id": 7, "text": "7,15.15", "task": {"answer": "15"}}
out  {"ready": true}                        once, when the verifier is loaded
out  {"id": 7, "reward": 1.0}
out  {"id": 8, "error": "KeyError: 'answer' (verifiers.py:23)"}

It ends when its input closes, and at once when its parent dies, whatever the verifier is doing.
"""

import argparse
import ctypes
import json
import math
import os
import resource
import signal
import sys
import traceback
from importlib import import_module
from typing import Any

from pipelinerl_core.rewards.verifiers import Verifier

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Read the arguments, put up the limits, serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verifier", required=True, help="module:function")
    parser.add_argument("--memory-bytes", type=int, required=True, help="limit of the address space")
    parser.add_argument("--parent", type=int, required=True, help="process id of the parent")
    arguments = parser.parse_args()
    _die_with(arguments.parent)
    _limit(arguments.memory_bytes)
    replies = _claim_stdout()
    module, _, function = arguments.verifier.partition(":")
    verifier: Verifier = getattr(import_module(module), function)
    os.write(replies, b'{"ready":true}\n')
    for line in sys.stdin.buffer:
        request = json.loads(line)
        reply = json.dumps({"id": request["id"], **_scored(verifier, request)}) + "\n"
        _write_all(replies, reply.encode())  # at once: the parent measures a scoring by the reply before it


def _scored(verifier: Verifier, request: dict[str, Any]) -> dict[str, Any]:
    try:
        reward = float(verifier(request["text"], request["task"]))
    except Exception as error:  # noqa: BLE001  (the boundary: whatever a verifier raises is data)
        return {"error": _one_line(error)}
    if not math.isfinite(reward):
        return {"error": f"the reward is {reward}, not a finite number"}
    return {"reward": reward}


def _one_line(error: Exception) -> str:
    """Type, first line of the message and innermost place of an exception."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    message = (str(error).splitlines() or [""])[0][:200]
    return f"{type(error).__name__}: {message} ({os.path.basename(place.filename)}:{place.lineno})"


def _die_with(parent: int) -> None:
    """The kernel kills this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        os._exit(3)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole terminal; the parent decides


def _limit(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _claim_stdout() -> int:
    """A private descriptor for the replies; what a verifier prints goes to stderr."""
    replies = os.dup(1)
    os.dup2(2, 1)
    return replies


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    main()
