"""The shared-memory directory in which an engine stages verified weights for its worker processes.

The directory is inside the run's shared memory, so that verified files are linked instead of copied, and so that the
removal of the run's shared memory also removes staged files of an engine that was killed.
"""

import os
import shutil
from pathlib import Path

from pipelinerl_core.weights.publish import SHM_ROOT, shm_directory


def staging_directory(run_id: str, name: str) -> Path | None:
    """The staging directory of role `name` in this process; None on a host without shared memory.

    Removes directories that ended processes of this name have left.
    """
    if not SHM_ROOT.is_dir():
        return None
    parent = shm_directory(run_id) / "staged"
    for old in parent.glob(f"{name}.*"):
        if not Path("/proc", old.suffix[1:]).exists():
            shutil.rmtree(old, ignore_errors=True)
    return parent / f"{name}.{os.getpid()}"
