"""The arms of a what-if replay: which settings they may change, and where their objects are.

    <root>/whatif/<run_id>/arms/<name>-<digest>/    an arm: a run of its own, and replay.json when it is trained
    <root>/whatif/<run_id>/studies/<digest>/        whatif.json and whatif.html of a study

The digest is over the settings, the steps, the recorded run and the library versions: the same command finds the same
arm, and a changed setting makes a new arm.
"""

import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pipelinerl_core.comparison.plan import digest_of, run_digest
from pipelinerl_core.config import RunConfig
from pipelinerl_core.config.arm import Arm, parse_arm
from pipelinerl_core.config.load import override_config
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.run.context import RunContext, open_run, refuse_arm
from pipelinerl_core.run.history import counted_commit_keys, steps_to_replay
from pipelinerl_core.run.locate import code_version
from pipelinerl_core.run.records import REPLAY_KEY, RUN_KEY, WHATIF_PREFIX, ReplayOf, RunRecord, code_key
from pipelinerl_core.storage.object_store import open_store

RECORDED = "recorded"
"""Name of the arm with the recorded objective."""
STUDIED = ("loss", "learner")
"""Sections that an arm may change."""
_NEEDS = {
    "schedule": "groups that the schedule would have chosen",
    "trainer": "steps of other groups",
    "prompts": "rollouts of other prompts",
    "rollouts": "other rollouts (a group size, a length or a filter needs groups that were not recorded)",
    "reward": "scores that were not recorded",
    "environment": "rollouts of another environment",
    "engine": "rollouts of another engine",
    "model": "rollouts of another model",
    "seed": "rollouts of another seed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedArm:
    """One arm of a run: changed settings, and the run in which the result is kept."""

    name: str
    original: RunContext
    origin: ReplayOf
    config: RunConfig
    store: ObjectStore

    @property
    def is_recorded(self) -> bool:
        """Whether the arm has the recorded objective."""
        return not self.origin.overrides

    @property
    def is_trained(self) -> bool:
        """Whether every step of the arm is trained."""
        return self.store.exists(REPLAY_KEY)


def plan_arms(run: RunContext, arms: Sequence[Arm], first: int | None, last: int | None) -> list[PlannedArm]:
    """The arms, checked. first, last: steps to train again, None: of the run. Raises ConfigError in one line."""
    refuse_arm(run, "Replay")
    commits = counted_commit_keys(run.store)
    begin, end = steps_to_replay(run.store.url, commits, first, last)
    planned: list[PlannedArm] = []
    for arm in arms:
        config = studied_config(run.config, arm.overrides)
        origin = ReplayOf(url=run.store.url, run_id=run.run_id, overrides=arm.overrides, first=begin, last=end)
        digest = digest_of([run_digest(config), run.run_id, run.record.created_at, begin, commits[end]])
        store = whatif_store(run).child(f"arms/{arm.name}-{digest}")
        planned.append(PlannedArm(name=arm.name, original=run, origin=origin, config=config, store=store))
    _check_different(planned)
    return planned


def _check_different(planned: Sequence[PlannedArm]) -> None:
    for index, arm in enumerate(planned):
        same = next((one for one in planned[:index] if one.config == arm.config), None)
        if same is not None:
            raise ConfigError(f"arm {arm.name}: its settings are those of arm {same.name}. Remove one of them")
        if any(one.name == arm.name for one in planned[:index]):
            raise ConfigError(f"two arms are named {arm.name}. Name them: --arm 'NAME: section.key=value'")


def studied_config(recorded: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """The configuration of an arm. Raises ConfigError if the settings need more than the recorded rollouts."""
    for override in overrides:
        section = override.partition("=")[0].partition(".")[0]
        if section not in STUDIED:
            needed = _NEEDS.get(section, "more than the recorded rollouts")
            raise ConfigError(
                f"{override}: a replay can only change keys of {' and '.join(STUDIED)}; this key needs {needed}. "
                "Start a new run"
            )
    studied = override_config(recorded, overrides)
    if overrides and studied == recorded:
        raise ConfigError(f"{' '.join(overrides)}: the run was recorded with these settings. Change a setting")
    for key in ("kind", "lora_rank", "lora_targets"):
        if getattr(recorded.learner, key) != getattr(studied.learner, key):
            raise ConfigError(
                f"learner.{key}: a replay starts from a recorded checkpoint and must train the same tensors. "
                f"Remove learner.{key}, or start a new run"
            )
    if (recorded.loss.advantage == "value") != (studied.loss.advantage == "value"):
        raise ConfigError(
            f"loss.advantage={studied.loss.advantage}: the run was recorded with {recorded.loss.advantage}, and a "
            "checkpoint has a value head or has none. Start a new run to add or remove a value head"
        )
    return studied


def parse_study_arm(text: str) -> Arm:
    """An arm of --arm: "section.key=value ..." or "NAME: section.key=value ...". Raises ConfigError.

    Example: "learner.lr=1e-4" is named lr-1e-4.
    """
    if ":" in text.partition("=")[0]:
        return parse_arm(text)
    settings = tuple(shlex.split(text))
    if not settings or not all("=" in one for one in settings):
        raise ConfigError(f'--arm {text}: not an arm. Write "section.key=value", for example --arm learner.lr=1e-4')
    return Arm(name_of(settings), settings)


def name_of(overrides: Sequence[str]) -> str:
    """A name from settings. Example: ("loss.kind=ppo", "learner.lr=1e-4") -> kind-ppo-lr-1e-4."""
    keys = "-".join(one.partition(".")[2] for one in overrides)
    return re.sub(r"[^A-Za-z0-9.]+", "-", keys).strip("-.")[:60] or "arm"


def whatif_store(run: RunContext) -> ObjectStore:
    """The store of all arms and studies of a run, beside the run."""
    root = run.store.url.rpartition("/")[0]
    return open_store(f"{root}/{WHATIF_PREFIX}/{run.run_id}")


def open_arm(planned: PlannedArm, mlflow: tuple[str, str] | None) -> RunContext:
    """The run of an arm, created if it does not exist. mlflow: (uri, run id) for a new arm."""
    original, store = planned.original, planned.store
    if not store.exists(RUN_KEY):
        sha256 = original.record.reward_sha256
        if sha256 is not None:
            store.put(code_key(sha256), original.store.get(code_key(sha256)))
        record = RunRecord(
            run_id=store.url.rpartition("/")[2],
            created_at=time.time(),
            code_version=code_version(),
            config=planned.config.model_dump(mode="json"),
            mlflow_uri=mlflow[0] if mlflow else None,
            mlflow_run_id=mlflow[1] if mlflow else None,
            reward_sha256=sha256,
            replay_of=planned.origin,
        )
        store.put(RUN_KEY, record.model_dump_json(indent=2).encode())
    return open_run(store.url)
