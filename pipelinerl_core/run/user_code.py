"""Files of the user: stored with a new run, read back by the roles that use them."""

import hashlib
import logging
from importlib.metadata import packages_distributions, version
from pathlib import Path

from pipelinerl_core.config import RunConfig
from pipelinerl_core.config.mixture import naming
from pipelinerl_core.config.verifier import scored_by
from pipelinerl_core.errors import ChecksumMismatch, ConfigError
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.run.context import RunContext
from pipelinerl_core.run.git import git_commit
from pipelinerl_core.run.records import code_key

logger = logging.getLogger(__name__)


def local_code(config: RunConfig) -> str | None:
    """Text of the file that reward.function or environment.path names; None for a module or neither. Raises
    ConfigError."""
    return read_local(*scored_by(config))


def read_local(key: str, location: str) -> str | None:
    """Text of the file of a location, FILE.py:NAME; None for a module or an empty location. Raises ConfigError.

    key: of the configuration, for messages.
    """
    path = _file(location)
    if path is None:
        return None
    try:
        if path.exists() and not path.is_file():
            raise OSError("this is no file")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = f"no such file in {path.parent.resolve()}" if isinstance(error, FileNotFoundError) else str(error)
        kind = "CLASS" if key == "environment.path" else "FUNCTION"
        raise ConfigError(
            f"{key}={location}: {reason}. Set {key} to FILE.py:{kind}, with FILE.py relative to the working "
            f"directory, or to package.module:{kind}"
        ) from None


def store_code(store: ObjectStore, config: RunConfig) -> dict[str, str]:
    """Store the user's files; returns name -> sha256 of each file, as in RunRecord.code. Raises ConfigError."""
    digests: dict[str, str] = {}
    for name, (key, location) in _locations(config).items():
        with naming(name if key != name else ""):
            code = read_local(key, location)
        if code is not None:
            digests[name] = _sha256(code)
            store.put(code_key(digests[name]), code.encode())
    return digests


def local_code_digests(config: RunConfig) -> dict[str, str]:
    """Name -> sha256 of each file of the user that is on this host, as in RunRecord.code."""
    files = {name: _file(location) for name, (_, location) in _locations(config).items()}
    return {name: _sha256(_text(file)) for name, file in files.items() if file is not None and file.is_file()}


def installed_packages(config: RunConfig) -> dict[str, str]:
    """Name -> distribution and version of each module of the user, as in RunRecord.packages."""
    packages: dict[str, str] = {}
    for name, (_, location) in _locations(config).items():
        module = "" if _file(location) else location.partition(".")[0].partition(":")[0]
        for distribution in packages_distributions().get(module, ())[:1]:
            packages[name] = f"{distribution} {version(distribution)}"
    return packages


def code_commits(config: RunConfig) -> dict[str, str]:
    """Name -> commit of the git checkout that has the file, as in RunRecord.commits."""
    files = {name: _file(location) for name, (_, location) in _locations(config).items()}
    commits = {
        name: git_commit(file.parent, with_changes_beside=file.name)
        for name, file in files.items()
        if file is not None
    }
    return {name: commit for name, commit in commits.items() if commit}


def stored_code(run: RunContext, name: str = "") -> str | None:
    """Text of the file that is stored under a name of RunRecord.code; None without such a file. Raises
    ChecksumMismatch."""
    sha256 = run.record.code.get(name)
    if sha256 is None:
        return None
    key = code_key(sha256)
    code = run.store.get(key).decode(errors="replace")
    if _sha256(code) != sha256:
        raise ChecksumMismatch(f"{key}: the bytes differ from the sha256 in the key")
    return code


def stored_files(run: RunContext) -> dict[str, str]:
    """FILE.py:NAME, as the configuration names it -> the text that the run uses. Raises ChecksumMismatch."""
    files = {location: stored_code(run, name) for name, (_, location) in _locations(run.config).items()}
    return {location: code for location, code in files.items() if code is not None}


def warn_of_changed_code(run: RunContext) -> None:
    """Log one line for each local file of the user that differs from the copy that the run uses, and for each package
    of another version."""
    for name, (_, location) in _locations(run.config).items():
        path, stored = _file(location), run.record.code.get(name)
        if stored is None or path is None or not path.is_file():
            continue
        sha256 = _sha256(_text(path))
        if sha256 != stored:
            logger.warning(
                "%s has changed since the run started: sha256 %s, stored %s. The run uses the stored copy; start a "
                "new run to use the changed file", path, sha256, stored,
            )  # fmt: skip
    installed = installed_packages(run.config)
    for name, package in run.record.packages.items():
        if installed.get(name) != package:
            logger.warning(
                "%s: the run started with %s, this host has %s", name or "reward.function or environment.path",
                package, installed.get(name, "none"),
            )  # fmt: skip


def _locations(config: RunConfig) -> dict[str, tuple[str, str]]:
    """Name of RunRecord.code -> (key, location) of each function or class of the user.

    The name is the part of the mixture: "" without a mixture, and for eval.sets beside a mixture; or the key in the
    section `loss`.
    """
    own = {"": config} if config.eval.sets else {}
    scored = {name: scored_by(part) for name, part in {**own, **config.parts}.items()}
    named = {name: (key, location) for name, (key, location) in scored.items() if location}
    return named | {key: (key, location) for key, location in config.loss.own_functions.items()}


def _file(location: str) -> Path | None:
    """The file of a location, relative to the working directory; None for a module."""
    place = location.rpartition(":")[0]
    return Path(place).expanduser() if place.endswith(".py") else None


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _sha256(code: str) -> str:
    return hashlib.sha256(code.encode()).hexdigest()
