"""The commit of a git checkout."""

import subprocess
from pathlib import Path

DIRTY = "-dirty"
"""After a commit: the checkout has changes that are not committed."""
_GIT_SECONDS = 5.0


def git_commit(directory: Path, *, with_changes_beside: str = "") -> str | None:
    """Commit of the git checkout that contains a directory, 40 hex digits; None without a checkout or git.

    with_changes_beside: a file of the directory; DIRTY is appended if this file is not committed as it is, or if a
    file that git tracks has changes.
    """
    commit = _git(directory, "rev-parse", "HEAD")
    if not commit or not with_changes_beside:
        return commit or None
    tracked = _git(directory, "status", "--porcelain", "--untracked-files=no")
    own = _git(directory, "status", "--porcelain", "--", with_changes_beside)
    return f"{commit}{DIRTY}" if tracked or own else commit


def _git(directory: Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(directory), *arguments]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
