"""The runs below a root, newest first, each with its state and its newest figures."""

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from pipelinerl_core.config.gpu_counts import needed_gpus
from pipelinerl_core.errors import ConfigError, MissingObject, StoreError, StoreUnavailable
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.models.resolve import build_config, resume_config
from pipelinerl_core.run.commits import Commits, read_commits
from pipelinerl_core.run.context import planned_steps, resume_overrides
from pipelinerl_core.run.hub_status import HubWatch
from pipelinerl_core.run.reading import list_keys, read_record
from pipelinerl_core.run.records import (
    EVALS_PREFIX,
    RUN_KEY,
    EvalRecord,
    RunRecord,
    eval_key,
    eval_version,
    parse_commit_key,
)

STATES = ("running", "stopped", "finished", "unreadable")
SORTS: Mapping[str, Callable[["ListedRun"], Any]] = MappingProxyType(
    {
        "started": lambda run: run.created_at,
        "owner": lambda run: run.owner,
        "state": lambda run: run.state,
        "step": lambda run: run.step,
        "reward": lambda run: run.reward,
        "held_out": lambda run: run.held_out_last,
        "tokens": lambda run: run.tokens,
        "hours": lambda run: run.seconds,
        "gpu_hours": lambda run: run.seconds * run.gpus,
    }
)
"""Orders of the list; the largest value is first, of texts the smallest, and runs without a value are last."""
_THREADS = 8
"""Runs that are read at once; a hub on another host is watched for up to five seconds."""
DAMAGE = (OSError, TypeError, ValueError, AttributeError, KeyError)
"""Raised by records whose values have other types, and by files that cannot be read."""
_UNIT_SECONDS = MappingProxyType({"d": 86400, "h": 3600, "min": 60})
_AGE = re.compile(r"(\d+(?:\.\d+)?) ?(d|h|min)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRun:
    """One run of the list."""

    run_id: str
    created_at: float
    """Unix time of the start of the run; 0 if run.json cannot be read."""
    state: str
    """running, stopped, finished, or unreadable."""
    step: int = 0
    steps: int = 0
    model: str = ""
    """model.path of the configuration."""
    preset: str = ""
    given_name: str = ""
    """tracking.name of the configuration."""
    owner: str = ""
    tags: tuple[str, ...] = ()
    notes: str = ""
    parent: str = ""
    """The version that the run started from, <run>@<step>; empty: the model itself."""
    reward: float | None = None
    """Mean reward of the newest step."""
    held_out_first: float | None = None
    held_out_last: float | None = None
    """Held-out accuracy of the first and the newest evaluated version."""
    tokens: int = 0
    """Tokens that were generated."""
    seconds: float = 0.0
    """Time of training: from each start of the trainer to its last commit."""
    gpus: int = 0
    """GPUs that the configuration uses at the same time."""
    active_at: float = 0.0
    """Unix time of the newest commit, else of the start; 0 if it cannot be read."""
    url: str = ""
    problem: str = ""
    """Why the run is unreadable."""

    @property
    def name(self) -> str:
        """The directory of the run under the root; its id, unless somebody has renamed the directory."""
        return self.url.rpartition("/")[2]

    def document(self) -> dict[str, Any]:
        """The run as JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which runs to list; an empty text: any."""

    owner: str = ""
    """A part of the owner."""
    is_exact: bool = False
    """The owner is the whole `user` or `user@host`."""
    tag: str = ""
    """A tag, `team:alice`, or the key of one, `team`."""
    state: str = ""
    older_than: str = ""
    """Time since the last activity, that is, the newest commit, else the start: 90min, 12h, 30d."""

    def __post_init__(self) -> None:
        """Raise ConfigError for an unknown state and a wrong age."""
        if self.state not in ("", *STATES):
            raise ConfigError(f"--state {self.state}: must be {', '.join(STATES)}")
        if self.older_than and not _AGE.fullmatch(self.older_than):
            raise ConfigError(
                f"--older-than {self.older_than}: must be a number with min, h or d, such as 90min or 30d"
            )

    def __bool__(self) -> bool:
        """Whether any condition is set."""
        return bool(self.owner or self.tag or self.state or self.older_than)

    def accepts(self, record: RunRecord | str) -> bool:
        """Whether owner and tags match; a run that cannot be read matches if none is asked for."""
        if isinstance(record, str):
            return not (self.owner or self.tag)
        return self._fits(record.owner, _tags(record))

    def _fits(self, owner: str, tags: Iterable[str]) -> bool:
        has_tag = not self.tag or any(tag == self.tag or tag.partition(":")[0] == self.tag for tag in tags)
        if self.owner and self.is_exact:
            return has_tag and self.owner in (owner, owner.partition("@")[0])
        return has_tag and self.owner in owner

    def matches(self, run: ListedRun) -> bool:
        """Whether all conditions hold; a run whose activity cannot be read has no age."""
        if self.older_than:
            number, unit = _AGE.fullmatch(self.older_than).groups()  # type: ignore[union-attr]
            if not run.active_at or time.time() - run.active_at < float(number) * _UNIT_SECONDS[unit]:
                return False
        return self.state in ("", run.state) and self._fits(run.owner, run.tags)


def list_runs(
    root: ObjectStore,
    limit: int = 0,
    wanted: Wanted = Wanted(),
    *,
    with_unreadable: bool = False,
    watches: dict[str, HubWatch] | None = None,
) -> list[ListedRun]:
    """The newest `limit` runs of a root (0: all), newest first. A run whose objects are damaged is `unreadable`.

    with_unreadable: also the unreadable runs of which this function cannot decide whether they are wanted.
    watches: URL -> watch, for calls one after another: a later call does not wait for a hub that is known to be dead.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        stores = [root.child(name) for name in root.children() if not name.startswith(".")]
        pairs = [(store, record) for store, record in zip(stores, pool.map(_record, stores), strict=True) if record]
        pairs.sort(key=lambda pair: pair[1].created_at if isinstance(pair[1], RunRecord) else 0.0, reverse=True)
        pairs = [pair for pair in pairs if wanted.accepts(pair[1]) or (with_unreadable and isinstance(pair[1], str))]
        if limit and not (wanted.state or wanted.older_than):
            pairs = pairs[:limit]
        listed = [
            run
            for run in pool.map(lambda pair: _listed(pair[0], pair[1], watches), pairs)
            if wanted.matches(run) or (with_unreadable and run.problem)
        ]
        return listed[:limit] if limit else listed


def list_run(store: ObjectStore, commits: Commits | None = None) -> ListedRun | None:
    """One run, as `list_runs` has it; None if there is none. commits: those that the caller has read."""
    record = _record(store)
    return _listed(store, record, commits=commits) if record else None


def sorted_runs(runs: Sequence[ListedRun], sort: str) -> list[ListedRun]:
    """The runs in the order of a key of SORTS."""
    value = SORTS[sort]
    known = [run for run in runs if value(run) not in (None, "")]
    is_text = any(isinstance(value(run), str) for run in known)
    return [*sorted(known, key=value, reverse=not is_text), *(run for run in runs if value(run) in (None, ""))]


def run_names(root: ObjectStore) -> list[str]:
    """Ids of the runs of a root, in the order of names."""
    return [name for name in root.children() if root.exists(f"{name}/{RUN_KEY}")]


def _record(store: ObjectStore) -> RunRecord | str | None:
    """run.json, why run.json is unreadable, or None if there is no run at this place."""
    try:
        return read_record(store, RUN_KEY, RunRecord)
    except MissingObject:
        return None
    except StoreUnavailable:
        raise
    except (StoreError, *DAMAGE) as error:
        return f"{RUN_KEY}: {error}"


def _listed(
    store: ObjectStore,
    record: RunRecord | str,
    watches: dict[str, HubWatch] | None = None,
    commits: Commits | None = None,
) -> ListedRun:
    run_id = store.url.rpartition("/")[2]
    if isinstance(record, str):
        return ListedRun(run_id=run_id, created_at=0.0, state="unreadable", url=store.url, problem=record)
    try:
        watch = (watches if watches is not None else {}).setdefault(store.url, HubWatch(store))
        return _read(store, record, watch, commits if commits is not None else read_commits(store))
    except StoreUnavailable:
        raise
    except (StoreError, *DAMAGE) as error:
        return ListedRun(
            run_id=run_id,
            created_at=record.created_at,
            state="unreadable",
            owner=record.owner,
            tags=_tags(record),
            url=store.url,
            problem=str(error) or type(error).__name__,
        )


def _read(store: ObjectStore, record: RunRecord, watch: HubWatch, commits: Commits) -> ListedRun:
    last = next(iter(commits.newest(1)), None)
    steps = planned_steps(store, record)
    step = last.step if last else 0
    is_over = bool(last and step >= steps)
    keys = list_keys(store, EVALS_PREFIX)  # of the run's own prompts and of eval.sets
    versions = sorted(version for key in keys if key == eval_key(version := eval_version(key)))
    first, newest = (_accuracy(store, versions[at : at + 1 or None]) for at in (0, -1))
    return ListedRun(
        run_id=record.run_id,
        created_at=record.created_at,
        state="finished" if is_over else "running" if watch.find_live() else "stopped",
        step=step,
        steps=steps,
        model=record.model_path,
        preset=record.preset,
        given_name=_tracking(record).get("name", ""),
        owner=record.owner,
        tags=_tags(record),
        notes=_tracking(record).get("notes", ""),
        parent=record.parent,
        active_at=last.committed_at if last else record.created_at,
        reward=last.metrics.get("reward/mean") if last else None,
        held_out_first=first,
        held_out_last=newest,
        tokens=last.tokens.get("generated", 0) if last else 0,
        seconds=_training_seconds(commits),
        gpus=_gpus(store, record),
        url=store.url,
    )


def _training_seconds(commits: Commits) -> float:
    """From each start of the trainer to the last of its commits."""
    last_steps = {parse_commit_key(key)[1]: step for step, key in commits.keys_by_step.items()}
    starts = {record.epoch: record.started_at for record in commits.epochs if record.role == "trainer"}
    seconds = [commits[step].committed_at - starts[epoch] for epoch, step in last_steps.items() if epoch in starts]
    return sum(max(0.0, part) for part in seconds)


def _gpus(store: ObjectStore, record: RunRecord) -> int:
    """As the latest resume has set them."""
    try:
        return needed_gpus(resume_config(build_config(record.config), resume_overrides(store)))[0]
    except ConfigError:  # of a release with other keys: the other figures are known
        return 0


def _tracking(record: RunRecord) -> dict[str, str]:
    """The values of the section tracking as text."""
    return {key: str(value) for key, value in record.config.get("tracking", {}).items()}


def _tags(record: RunRecord) -> tuple[str, ...]:
    tracking = record.config.get("tracking")
    tags = tracking.get("tags") if isinstance(tracking, Mapping) else ()
    return tuple(tag for tag in tags if isinstance(tag, str)) if isinstance(tags, (list, tuple)) else ()


def _accuracy(store: ObjectStore, versions: Sequence[int]) -> float | None:
    """The accuracy of the first of `versions` on the run's own prompts; None without a version or evaluation."""
    try:
        return read_record(store, eval_key(versions[0]), EvalRecord).known_accuracy if versions else None
    except MissingObject:
        return None


def run_table(runs: Sequence[ListedRun], now: float | None = None) -> list[str]:
    """The runs as aligned lines with a heading."""
    if not runs:
        return ["no runs yet"]
    rows: list[tuple[str, ...]] = [
        ("RUN", "STARTED", "OWNER", "STATE", "STEP", "REWARD", "HELD-OUT", "MODEL", "TAGS")
    ]
    for run in runs:
        held_out = " -> ".join(
            f"{accuracy:.3f}" for accuracy in (run.held_out_first, run.held_out_last) if accuracy is not None
        )
        reward = "" if run.reward is None else f"{run.reward:.3f}"
        step = f"{run.step}/{run.steps}" if run.steps else ""
        rows.append(
            (
                *(run.run_id, age(run.created_at, now), run.owner, run.state, step, reward, held_out),
                *(run.parent or run.model, ",".join(run.tags)),
            )
        )
    empty = {number for number in range(len(rows[0])) if not any(row[number] for row in rows[1:])}
    return aligned([[cell for number, cell in enumerate(row) if number not in empty] for row in rows])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows of a table as lines, with two spaces between its columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def age(created_at: float, now: float | None = None) -> str:
    """How long ago a Unix time was. Example: 3 h ago."""
    if not created_at:
        return ""
    seconds = max(0.0, (time.time() if now is None else now) - created_at)
    for unit, length in _UNIT_SECONDS.items():
        if seconds >= length:
            return f"{int(seconds // length)} {unit} ago"
    return "now"
