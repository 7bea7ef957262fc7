"""The shared-memory directory in which an engine stages verified weights for its worker processes.

The directory is inside the run's shared memory, so that verified files are linked instead of copied, and so that the
removal of the run's shared memory also removes staged files of an engine that was killed.
"""

import os
import shutil
from pathlib import Path

from pipelinerl_core.run.context import private_directory
from pipelinerl_core.weights.memory import SHM_ROOT, shm_directory


def staging_directory(run_id: str, name: str) -> Path | None:
    """The staging directory of role `name` in this process; None if the run has no shared memory on this host.

    Removes directories that ended processes of this name have left.
    """
    if not SHM_ROOT.is_dir():
        return None
    own = shm_directory(run_id)
    try:
        parent = (private_directory(own) if os.path.lexists(own) else own) / "staged"
    except OSError:  # another user has made a directory of this name
        return None
    for old in parent.glob(f"{name}.*"):
        if not Path("/proc", old.suffix[1:]).exists():
            shutil.rmtree(old, ignore_errors=True)
    return parent / f"{name}.{os.getpid()}"
