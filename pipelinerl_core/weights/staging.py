"""Where an engine whose workers are processes of their own finds its weights: in the run's shared memory.

Below the published versions, so that a verified file is linked and not copied, and so that whoever removes a run's
shared memory removes these with it, whatever became of the engine.
"""

import os
import shutil
from pathlib import Path

from pipelinerl_core.weights.publish import SHM_ROOT, shm_directory


def staging_directory(run_id: str, name: str) -> Path | None:
    """A directory of role `name` of this process alone; None on a host without shared memory.

    What a killed predecessor of that name left behind is removed.
    """
    if not SHM_ROOT.is_dir():
        return None
    parent = shm_directory(run_id) / "staged"
    for old in parent.glob(f"{name}.*"):
        if not Path("/proc", old.suffix[1:]).exists():
            shutil.rmtree(old, ignore_errors=True)
    return parent / f"{name}.{os.getpid()}"
