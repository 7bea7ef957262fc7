"""The file of reward.function or environment.path: stored with a new run, read back by the roles that score."""

import hashlib
import logging

from pipelinerl_core.config import RunConfig
from pipelinerl_core.config.mixture import naming
from pipelinerl_core.config.verifier import code_file
from pipelinerl_core.errors import ChecksumMismatch, ConfigError
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.run.context import RunContext
from pipelinerl_core.run.records import code_key

logger = logging.getLogger(__name__)


def local_code(config: RunConfig) -> str | None:
    """Text of the file that reward.function or environment.path names; None for a module or neither. Raises
    ConfigError."""
    path = code_file(config)
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = f"no such file in {path.parent.resolve()}" if isinstance(error, FileNotFoundError) else str(error)
        is_function = bool(config.reward.function)
        key, kind = ("reward.function", "FUNCTION") if is_function else ("environment.path", "CLASS")
        raise ConfigError(
            f"{key}={config.reward.function or config.environment.path}: {reason}. Set {key} to FILE.py:{kind}, with "
            f"FILE.py relative to the working directory, or to package.module:{kind}"
        ) from None


def store_code(store: ObjectStore, config: RunConfig) -> dict[str, str]:
    """Store the user's files; returns part of the mixture -> sha256 of its file, without parts that have no file.

    The part is "" without a mixture, and for eval.sets beside a mixture. Raises ConfigError.
    """
    found: dict[str, str] = {}
    own = {"": config} if config.eval.sets else {}
    for name, part in {**own, **config.parts}.items():
        with naming(name):
            code = local_code(part)
        if code is not None:
            found[name] = _sha256(code)
            store.put(code_key(found[name]), code.encode())
    return found


def stored_code(run: RunContext, part: str = "") -> str | None:
    """Text of the file that is stored for a part of the mixture, or for the run without a mixture; None without such
    a file. Raises ChecksumMismatch."""
    sha256 = run.record.code_sha256(part)
    if sha256 is None:
        return None
    key = code_key(sha256)
    code = run.store.get(key).decode(errors="replace")
    if _sha256(code) != sha256:
        raise ChecksumMismatch(f"{key}: the bytes differ from the sha256 in the key")
    return code


def warn_of_changed_code(run: RunContext) -> None:
    """Log one line for each local file of the user that differs from the copy that the run uses."""
    for name, part in run.config.parts.items():
        path, stored = code_file(part), run.record.code_sha256(name)
        if stored is None or path is None or not path.is_file():
            continue
        sha256 = _sha256(path.read_text(encoding="utf-8", errors="replace"))
        if sha256 != stored:
            logger.warning(
                "%s has changed since the run started: sha256 %s, stored %s. The run uses the stored copy; start a "
                "new run to use the changed file", path, sha256, stored,
            )  # fmt: skip


def _sha256(code: str) -> str:
    return hashlib.sha256(code.encode()).hexdigest()
