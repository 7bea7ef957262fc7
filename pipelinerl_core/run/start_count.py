"""How often a flow run has started without a new commit in between, as an object of the run.

Without the limit, the automation would restart a flow run that always crashes at the same step without end.
"""

import logging

from pipelinerl_core.errors import PipelineRLError
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.restart_budget import restart_text, spent_text
from pipelinerl_core.run.history import counted_commit_keys
from pipelinerl_core.run.reading import find_record
from pipelinerl_core.run.records import STARTS_KEY, StartsRecord
from pipelinerl_core.storage.object_store import open_store

logger = logging.getLogger(__name__)


def count_start(url: str, flow_run_id: str, run_count: int, limit: int) -> None:
    """Record in the run at `url`, which need not exist yet, that this flow run starts for the `run_count`-th time.

    Raises PipelineRLError if the flow run was started again more than `limit` times in a row without a new commit.
    The count begins again with the next start of the flow run (a manual Retry), and with another flow run
    (`pipelinerl resume`).
    """
    store = open_store(url)
    step = max(counted_commit_keys(store), default=-1)
    now = StartsRecord(flow_run_id=flow_run_id, run_count=run_count, step=step)
    since = find_record(store, STARTS_KEY, StartsRecord)
    if since is None or since.flow_run_id != flow_run_id or since.step < step:
        _write(store, now)
        return
    tries = run_count - since.run_count
    where = "before the first commit" if step < 0 else f"after step {step}"
    if tries > limit:
        _write(store, now)
        raise PipelineRLError(
            f"given up: this flow run made no new commit {where}, "
            f"{spent_text(tries - 1, f'placement.max_resumes={limit}')}. "
            "Find the cause of the crash in the logs of the roles; then continue with Retry or `pipelinerl resume`"
        )
    if tries > 0:
        logger.warning("no new commit %s; %s", where, restart_text(tries, limit))


def _write(store: ObjectStore, record: StartsRecord) -> None:
    store.put(STARTS_KEY, record.model_dump_json().encode())
