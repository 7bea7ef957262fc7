"""Opening a run: its record, its configuration and the token of the hub, which every role reads at its start."""

import errno
import json
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipelinerl_core.config import RunConfig
from pipelinerl_core.config.load import RESUMABLE
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.models.resolve import build_config, resume_config
from pipelinerl_core.run.reading import find_record
from pipelinerl_core.run.records import RESUME_KEY, RUN_KEY, ResumeRecord, RunRecord
from pipelinerl_core.storage.object_store import open_store

TOKEN_VARIABLE = "PIPELINERL_TOKEN"
RESTARTS_VARIABLE = "PIPELINERL_RESTARTS"
"""Number of restarts of this role by its supervisor."""
OUTER_TEMPORARY_VARIABLE = "PIPELINERL_OUTER_TMPDIR"
"""The temporary directory of the supervisor; the role's own temporary directory is removed when the role ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """An opened run."""

    store: ObjectStore
    record: RunRecord
    config: RunConfig
    token: str

    @property
    def run_id(self) -> str:
        return self.record.run_id


def log_directory(url: str, run_id: str) -> Path:
    """Directory of the roles' logs: beside the run's objects, or a temporary directory for a remote store.

    Raises ConfigError if the temporary directory is not this user's.
    """
    if url.startswith("file://"):
        return Path(url.removeprefix("file://")) / "logs"
    own = outer_temporary() / f"pipelinerl-{os.geteuid()}"
    try:
        return private_directory(own) / run_id / "logs"
    except OSError as error:
        raise ConfigError(f"{own}: no place for logs ({error.strerror}). Set TMPDIR to another directory") from None


def private_directory(path: Path) -> Path:
    """`path` as a directory of this user, mode 0700, created if it is missing. Raises OSError.

    For fixed names in directories of all users, such as /tmp: a link or a directory of another user is refused.
    """
    with suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(directory).st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "it belongs to another user", str(path))
        os.fchmod(directory, 0o700)
    finally:
        os.close(directory)
    return path


def outer_temporary() -> Path:
    """The host's temporary directory; TMPDIR of a role is a directory that is removed when the role ends."""
    return Path(os.environ.get(OUTER_TEMPORARY_VARIABLE) or tempfile.gettempdir())


def open_run(url: str) -> RunContext:
    """Open the run at a URL; ConfigError if there is no run."""
    store = open_store(url)
    record = find_record(store, RUN_KEY, RunRecord)
    if record is None:
        raise ConfigError(f"{url}: no run here ({RUN_KEY} is missing). Start it with `pipelinerl train`")
    token = given_token()
    config = resume_config(build_config(record.config), resume_overrides(store))
    return RunContext(store=store, record=record, config=config, token=token)


def given_token() -> str:
    """The token of the hub in the environment, or an empty text. Raises ConfigError if gRPC could not send it."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(f"{TOKEN_VARIABLE}: must be one line of printable ASCII characters")
    return token


def resume_overrides(store: ObjectStore) -> tuple[str, ...]:
    """Overrides of all resumes so far."""
    record = find_record(store, RESUME_KEY, ResumeRecord)
    return record.overrides if record else ()


def last_resume_at(store: ObjectStore) -> float:
    """Unix seconds of the last resume that changed settings; 0 without one."""
    record = find_record(store, RESUME_KEY, ResumeRecord)
    return record.at if record else 0.0


def planned_steps(store: ObjectStore, record: RunRecord) -> int:
    """trainer.steps of the run, as the latest resume has set it; 0 if the configuration has none."""
    steps = str(record.config.get("trainer", {}).get("steps", 0))
    for override in resume_overrides(store):
        key, _, value = override.partition("=")
        steps = value if key == "trainer.steps" else steps
    return int(float(steps))


def note_resume(run: RunContext, overrides: Sequence[str]) -> None:
    """Store checked overrides for all later starts of roles, in addition to the overrides of earlier resumes.

    run: with the configuration that the overrides have made.
    """
    known = resume_overrides(run.store)
    kinds = tuple(f"{override.partition('.kind=')[0]}." for override in overrides if ".kind=" in override)
    first = build_config(run.record.config)
    # Another kind of a section forgets the values of the former kind.
    candidates = [(*known, *overrides), (*(each for each in known if not each.startswith(kinds)), *overrides)]
    for section in kinds:
        candidates.append((*candidates[1], *_values_of(run.config, section)))
    for candidate in candidates:
        chosen = tuple({override.partition("=")[0]: override for override in candidate}.values())
        with suppress(ConfigError):
            if resume_config(first, chosen) == run.config:
                break
    else:
        raise ConfigError(f"{' '.join(overrides)}: not possible after {' '.join(known)}. Start a new run with --from")
    if chosen != known:  # a retry of the same resume changes nothing
        record = ResumeRecord(overrides=chosen, at=time.time())
        run.store.put(RESUME_KEY, record.model_dump_json().encode())


def _values_of(config: RunConfig, section: str) -> list[str]:
    """All values of a section that a resume can set, as overrides."""
    values = config.model_dump(mode="json")[section.rstrip(".")]
    return [f"{section}{name}={json.dumps(value)}" for name, value in values.items()
            if f"{section}{name}".startswith(RESUMABLE)]  # fmt: skip
