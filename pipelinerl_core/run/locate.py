"""Runs under a root: run ids, resolution of a RUN argument, opening and creating a run, and its shared memory."""

import getpass
import json
import logging
import os
import re
import shutil
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from pipelinerl_core import __version__
from pipelinerl_core.config import RunConfig
from pipelinerl_core.errors import ConfigError, MissingObject, StoreError
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.run.context import RunContext, open_run
from pipelinerl_core.run.git import git_commit
from pipelinerl_core.run.history import read_epochs
from pipelinerl_core.run.hub_status import HubWatch, is_descendant, process_lives, refuse_second_hub
from pipelinerl_core.run.local_files import local_files, parent_of
from pipelinerl_core.run.records import RUN_KEY, RunRecord
from pipelinerl_core.run.user_code import code_commits, installed_packages, store_code
from pipelinerl_core.storage.object_store import open_store

logger = logging.getLogger(__name__)

ROOT_VARIABLE = "PIPELINERL_ROOT"
SERVE_URL_VARIABLE = "PIPELINERL_SERVE_URL"
"""Where browsers reach `pipelinerl serve` for the root of this host's runs."""
DEFAULT_ROOT = "./runs"
LATEST_KEY = "latest.json"
"""Object under the root that names the run that was started or resumed last; `latest.<user>.json`: by that user."""
SHARED_MEMORY = Path("/dev/shm")
_SHORT_COMMIT = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class MlflowRef:
    """The MLflow run that records a run."""

    uri: str
    run_id: str


def root_url(root: str) -> str:
    """The root as a URL: `root`, else $PIPELINERL_ROOT, else ./runs."""
    return open_store(root or os.environ.get(ROOT_VARIABLE, "") or DEFAULT_ROOT).url


def new_run_id(source: str, flow_run_id: str) -> str:
    """<preset>-<last 8 digits of the flow run id>, so that a retry of the flow run opens the same run.

    The first digits of the ids that Prefect's scheduler gives are a time, and equal for all flow runs of a minute.
    """
    return f"{plain_name(source)}-{flow_run_id[-8:]}"


def plain_name(source: str) -> str:
    """Name of a preset or TOML file in lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", Path(source).name.removesuffix(".toml").lower()).strip("-") or "run"


def locate_run(run: str, root: str, *, of_all: bool = False, only_own: bool = False) -> str:
    """URL of a run given as an id under the root, `latest`, a path or a URL; ConfigError if there is no such run.

    of_all: `latest` is the run that anybody has started or resumed last, and not that of this user.
    only_own: `latest` is never the run of another user: without an own run, ConfigError.
    """
    if "://" in run or "/" in run or run in (".", ".."):
        store = open_store(run)
    else:
        base = open_store(root_url(root))
        store = base.child(_latest_id(base, of_all=of_all, only_own=only_own) if run == "latest" else _plain_id(run))
    if not store.exists(RUN_KEY):
        raise ConfigError(
            f"{run}: no run at {store.url}. Give an id under --root, `latest`, or the path or URL of a run"
        )
    return store.url


def _latest_id(base: ObjectStore, *, of_all: bool, only_own: bool) -> str:
    """A user without a run, or whose last run was removed, gets the newest run of all users unless `only_own`."""
    try:
        if not of_all:
            with suppress(MissingObject):
                own = _named_run(base, _latest_key(user_name()))
                if base.child(own).exists(RUN_KEY):
                    return own
        if only_own:
            raise ConfigError(f"latest: you have no run under {base.url}, or it was removed. Name the run by its id")
        return _named_run(base, LATEST_KEY)
    except MissingObject:
        raise ConfigError(
            f"latest: no run was started under {base.url} yet. Start one with `pipelinerl train`"
        ) from None


def _named_run(base: ObjectStore, key: str) -> str:
    try:
        return _plain_id(str(json.loads(base.get(key))["run_id"]))
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{base.url}/{key} is damaged: remove this object, or name a run by its id") from None


def _plain_id(run: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]+", run):
        raise ConfigError(
            f"{run!r}: not a run id. Ids are letters, digits, dots and dashes, like quickstart-1a2b3c4d"
        )
    return run


def run_url(root: str, run_id: str) -> str:
    """URL of the run with this id under a root."""
    return open_store(root_url(root)).child(run_id).url


def page_url(run_id: str) -> str:
    """Where `pipelinerl serve` shows a run; empty if its address is not known."""
    served = os.environ.get(SERVE_URL_VARIABLE, "").rstrip("/")
    return f"{served}/runs/{run_id}/" if served else ""


def find_run(url: str) -> RunContext | None:
    """The run at a URL, or None if there is no run yet."""
    return open_run(url) if open_store(url).exists(RUN_KEY) else None


def create_run(
    url: str, config: RunConfig, *, flow_run_id: str, mlflow: MlflowRef | None, preset: str = ""
) -> RunContext:
    """Write run.json and open the run; an existing run.json stays."""
    store = open_store(url)
    code = store_code(store, config)
    record = RunRecord(
        run_id=url.rpartition("/")[2],
        created_at=time.time(),
        code_version=code_version(),
        config=config.model_dump(mode="json"),
        flow_run_id=flow_run_id,
        mlflow_run_id=mlflow.run_id if mlflow else None,
        mlflow_uri=mlflow.uri if mlflow else None,
        code=code,
        packages=installed_packages(config),
        commits=code_commits(config),
        owner=owner_of(config),
        preset=preset,
        parent=parent_of(config),
        files=local_files(config),
    )
    try:
        store.put(RUN_KEY, record.model_dump_json(indent=2).encode(), create_only=True)
    except FileExistsError as error:
        if not store.exists(RUN_KEY):
            raise StoreError(str(error)) from None
    return open_run(url)


def owner_of(config: RunConfig) -> str:
    """tracking.owner, else user@host of this process."""
    user, host = user_name(), socket.gethostname()
    return config.tracking.owner or (f"{user}@{host}" if user else host)


def remember_latest(url: str, owner: str = "") -> None:
    """Set `latest` to this run, also that of its owner, `user` or `user@host`."""
    root, _, run_id = url.rpartition("/")
    store, text = open_store(root), json.dumps({"run_id": run_id, "at": time.time()}).encode()
    if owner:
        store.put(_latest_key(owner.partition("@")[0]), text)
    try:
        store.put(LATEST_KEY, text)
    except StoreError as error:  # in a directory with the sticky bit, a file of another user
        if not owner:
            raise
        logger.info("`latest` of other users stays the same: %s", error)


def _latest_key(user: str) -> str:
    return f"latest.{quote(user, safe='')}.json"


def user_name() -> str:
    """The user of this process; empty without a name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in some containers
        return ""


def code_version() -> str:
    """Version of the package, and the commit if the package is in a git checkout."""
    commit = own_commit()
    return f"{__version__}+{commit[:_SHORT_COMMIT]}" if commit else __version__


def own_commit() -> str | None:
    """Commit of the git checkout that has this package; None if the package was installed."""
    checkout = Path(__file__).parents[2]
    return git_commit(checkout) if (checkout / ".git").exists() else None


def local_directory(url: str) -> Path | None:
    """Directory of a file:// store, None for any other."""
    return Path(url.removeprefix("file://")) if url.startswith("file://") else None


def refuse_if_live(url: str) -> None:
    """Raise ConfigError if the run is live."""
    refuse_second_hub(open_store(url), ConfigError)


def shared_memory_of(run_id: str) -> Path:
    """Directory of a run's weights in this host's shared memory."""
    return SHARED_MEMORY / f"pipelinerl-{run_id}"


def remove_shared_memory(run: RunContext) -> None:
    """Remove the run's weights from this host's shared memory, unless the trainer of another start runs on this
    host."""
    if not _is_trained_here(run.store):
        shutil.rmtree(shared_memory_of(run.run_id), ignore_errors=True)


def remove_left_shared_memory(store: ObjectStore, run_id: str) -> None:
    """Remove the shared memory of a run on this host unless a process uses it, also one of a copy of the run."""
    directory = shared_memory_of(run_id)
    if directory.exists() and not _is_used(directory, store):
        shutil.rmtree(directory, ignore_errors=True)


def abandoned_shared_memory(root: str) -> list[Path]:
    """Directories in this host's shared memory of runs under a root that were killed: no process of the run lives."""
    base = open_store(root)
    abandoned = []
    for path in SHARED_MEMORY.glob(f"{shared_memory_of('').name}*"):
        store = base.child(path.name.removeprefix(shared_memory_of("").name))
        with suppress(StoreError, OSError):  # a run that cannot be read keeps its directory
            if store.exists(RUN_KEY) and not _is_used(path, store):
                abandoned.append(path)
    return sorted(abandoned)


def _is_used(shared_memory: Path, store: ObjectStore) -> bool:
    staged_by = {path.suffix.removeprefix(".") for path in shared_memory.glob("staged/*")}
    is_live = HubWatch(store).find_live() is not None
    is_used = is_live or _is_trained_here(store) or any(Path("/proc", pid).exists() for pid in staged_by)
    return is_used or _is_mapped(shared_memory)


def _is_mapped(directory: Path) -> bool:
    """Whether a process of this user maps a file of a directory: a copy of the run under another root may be live."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            if f" {directory}/" in maps.read_text(errors="replace"):
                return True
    return False


def _is_trained_here(store: ObjectStore) -> bool:
    try:
        trainers = [record for record in read_epochs(store) if record.role == "trainer"]
    except StoreError:
        return False
    newest = max(trainers, key=lambda record: record.epoch, default=None)
    if newest is None or newest.host != socket.gethostname() or is_descendant(newest.pid):  # this start's: is ending
        return False
    return process_lives(newest.pid, newest.process, lambda started_at: started_at < newest.started_at + 1.0)
