"""Calibrations of this machine, in the user's cache directory: one JSON file per model, engine and learner."""

import hashlib
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from pipelinerl_core.config import RunConfig
from pipelinerl_core.config.gpu_counts import gpus_of
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.recipes import cache_directory
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.planning.calibration import Calibration
from pipelinerl_core.planning.lengths import Lengths
from pipelinerl_core.planning.prediction import Prediction
from pipelinerl_core.planning.simulator import Work
from pipelinerl_core.planning.speeds import Line, MeasuredSpeeds
from pipelinerl_core.run.processor import processor
from pipelinerl_core.supervision.gpus import inventory

_FORMAT = 2
_TIMES = (
    "prompt_tokens", "swap_seconds", "publish_seconds", "commit_seconds", "fetch_seconds", "snapshot_seconds",
    "sync_seconds", "equal_share", "arrival_seconds", "usable_slots",
)  # fmt: skip
"""Fields of Work that a calibration measures, besides the lengths."""


def usable_cores(config: RunConfig) -> int:
    """Cores that engines and trainer share on this host; 0 if either computes on a GPU."""
    on_gpus = inventory() and (gpus_of(config, "actor") or gpus_of(config, "trainer"))
    return 0 if on_gpus else len(os.sched_getaffinity(0))


def store_calibration(calibration: Calibration) -> Path:
    """Write a calibration; returns its file."""
    path = _path(calibration.config)
    path.parent.mkdir(parents=True, exist_ok=True)
    work = calibration.work
    document = {
        "format": _FORMAT,
        "config": calibration.config.model_dump(mode="json"),
        "speeds": asdict(calibration.speeds),
        "other_speeds": None if calibration.other_speeds is None else asdict(calibration.other_speeds),
        "length_shares": work.lengths.shares.tolist(),
        "length_groups": None if work.lengths.groups is None else work.lengths.groups.tolist(),
        "lengths_are_course": work.lengths.is_course,
        "work": {name: getattr(work, name) for name in _TIMES},
        "measured": None if calibration.measured is None else asdict(calibration.measured),
        "cores": calibration.cores,
        "origin": f"calibration of {time.strftime('%Y-%m-%d', time.gmtime())} on this machine",
    }
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(document), encoding="utf-8")
    partial.replace(path)
    return path


def cached_calibration(config: RunConfig) -> Calibration | None:
    """The calibration of these settings on this machine; None if there is none or its file cannot be read."""
    try:
        stored: dict[str, Any] = json.loads(_path(config).read_text(encoding="utf-8"))
        if stored["format"] != _FORMAT:
            return None
        known = stored["length_groups"]
        groups = None if known is None else np.array(known, dtype=np.int64)
        lengths = Lengths(np.array(stored["length_shares"]), groups, stored["lengths_are_course"])
        return Calibration(
            config=build_config(stored["config"]),
            speeds=_speeds(stored["speeds"]),
            other_speeds=_speeds(other) if (other := stored["other_speeds"]) else None,
            work=Work(lengths=lengths, **stored["work"]),
            measured=Prediction(**measured) if (measured := stored.get("measured")) else None,
            cores=stored["cores"],
            origin=stored["origin"],
        )
    except (OSError, ValueError, KeyError, TypeError, ConfigError):
        return None


def _speeds(stored: dict[str, Any]) -> MeasuredSpeeds:
    return MeasuredSpeeds(decode=Line(**stored["decode"]), train=Line(**stored["train"]))


def _path(config: RunConfig) -> Path:
    """The file of the calibration: a hash of the settings and of the machine on which the speeds depend."""
    values, engine = config.model_dump(mode="json"), config.engine
    gpus = inventory()
    key = {
        "sections": {name: values[name] for name in ("model", "prompts", "reward", "environment", "learner")},
        "engine": [engine.kind, engine.kv, engine.tensor_parallel, engine.data_parallel],
        "tokens": [config.rollouts.max_tokens, config.rollouts.max_prompt_tokens],
        "weights": [config.weights.transport, config.weights.content],
        "threads": config.placement.threads,
        "machine": [processor(), usable_cores(config), gpus[0].name if gpus else ""],
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache_directory() / "calibrations" / f"{digest}.json"
