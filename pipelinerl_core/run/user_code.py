"""The file of reward.function or environment.path: stored with a new run, read back by the roles that score."""

import hashlib
import logging

from pipelinerl_core.config import RunConfig
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


def store_code(store: ObjectStore, config: RunConfig) -> str | None:
    """Store the user's file; returns its sha256, None without such a file. Raises ConfigError."""
    code = local_code(config)
    if code is None:
        return None
    sha256 = _sha256(code)
    store.put(code_key(sha256), code.encode())
    return sha256


def stored_code(run: RunContext) -> str | None:
    """Text of the file that is stored with the run; None without such a file. Raises ChecksumMismatch."""
    if run.record.reward_sha256 is None:
        return None
    key = code_key(run.record.reward_sha256)
    code = run.store.get(key).decode(errors="replace")
    if _sha256(code) != run.record.reward_sha256:
        raise ChecksumMismatch(f"{key}: the bytes differ from the sha256 in the key")
    return code


def warn_of_changed_code(run: RunContext) -> None:
    """Log one line if the user's local file differs from the copy that the run uses."""
    path = code_file(run.config)
    if run.record.reward_sha256 is None or path is None or not path.is_file():
        return
    sha256 = _sha256(path.read_text(encoding="utf-8", errors="replace"))
    if sha256 != run.record.reward_sha256:
        logger.warning(
            "%s has changed since the run started: sha256 %s, stored %s. The run uses the stored copy; start a new "
            "run to use the changed file", path, sha256, run.record.reward_sha256,
        )  # fmt: skip


def _sha256(code: str) -> str:
    return hashlib.sha256(code.encode()).hexdigest()
