"""Measures this machine for `pipelinerl simulate --calibrate`: two or three short runs of the configuration."""

import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from pipelinerl.flows.cli.console import say
from pipelinerl_core.config import RunConfig
from pipelinerl_core.errors import ConfigError

_STEPS = (30, 10, 12)
"""Most optimizer steps of each run; the first is longer because completions may get longer while a model learns."""
_DEADLINE_SECONDS = 3600.0


def measure(config: RunConfig) -> None:
    """Measure the configuration and store the calibration. Raises ConfigError if a run fails.

    The second run has a quarter of the slots and half of the groups, so that the fixed part of a decode step and of
    an optimizer step can be told apart from the part that grows with the load. On a CPU, the third run takes turns if
    the configuration does not, and the other way round: engines and trainer that compute at the same time slow each
    other down, by how much depends on the machine.
    """
    from pipelinerl_core.planning.cache import store_calibration, usable_cores
    from pipelinerl_core.planning.calibration import calibrate
    from pipelinerl_core.planning.prediction import MIN_STEPS
    from pipelinerl_core.report.facts import collect
    from pipelinerl_core.run.locate import locate_run
    from pipelinerl_core.storage.object_store import open_store

    if config.emulation.accelerators:
        raise ConfigError("--calibrate: the speeds are configured (emulation.accelerators), nothing is measured")
    slots = max(1, config.engine.concurrency // 4)
    groups = max(1, config.trainer.groups_per_step // 2)
    other = "schedule.kind=pipeline" if config.takes_turns else "schedule.kind=conventional"
    cores = usable_cores(config)
    changes = [
        (),
        (f"engine.concurrency={slots}", f"trainer.groups_per_step={groups}"),
        *([(other,)] if cores else []),
    ]
    with tempfile.TemporaryDirectory(prefix="prl-calibration-") as place:
        facts = []
        for number, (most, overrides) in enumerate(zip(_STEPS, changes, strict=False), 1):
            steps = max(MIN_STEPS, min(most, config.trainer.steps))
            say(f"calibration: run {number} of {len(changes)}, {steps} steps {' '.join(overrides)}")
            root = str(Path(place, str(number)))
            _train(config, Path(place, f"{number}.toml"), root, (f"trainer.steps={steps}", *overrides))
            facts.append(collect(open_store(locate_run("latest", root))))
        calibration = calibrate(*facts[:2], cores=cores)
        if cores:
            calibration = replace(calibration, other_speeds=calibrate(facts[2]).speeds)
    say(f"calibration: {store_calibration(calibration)}")


def _train(config: RunConfig, file: Path, root: str, overrides: tuple[str, ...]) -> None:
    from pipelinerl_core.config import as_toml
    from pipelinerl_core.models.resolve import override_config

    short = override_config(config, ["eval.num_prompts=0", "eval.every_steps=0", "placement.actors=1", *overrides])
    file.write_text(as_toml(short), encoding="utf-8")
    command = [sys.executable, "-m", "pipelinerl.flows.cli", "train", str(file), "--root", root]
    try:
        subprocess.run(
            command,
            check=True,
            timeout=_DEADLINE_SECONDS,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(f"--calibrate: the run of the configuration failed: {last}") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"--calibrate: the run took over {_DEADLINE_SECONDS:.0f} s. Use a recorded run") from None
