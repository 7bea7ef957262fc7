"""What a start makes of those before: how often they came to no new commit, and whether their drain still holds.

Whatever crashes a flow run again and again would do so for ever.
"""

import logging
from uuid import UUID

from pipelinerl.tasks.automations import was_resumed
from pipelinerl_core.errors import MissingObject, PipelineRLError
from pipelinerl_core.interfaces import ObjectStore
from pipelinerl_core.restart_budget import restart_text, spent_text
from pipelinerl_core.run.drain import clear_drain_request, wants_drain
from pipelinerl_core.run.history import counted_commit_keys, read_epochs
from pipelinerl_core.run.reading import read_record
from pipelinerl_core.run.records import STARTS_KEY, StartsRecord
from pipelinerl_core.storage.object_store import open_store

logger = logging.getLogger(__name__)


def count_start(url: str, flow_run_id: str, run_count: int, limit: int) -> None:
    """Note in the run at `url`, which may not be there yet, that this flow run starts for the `run_count`-th time.

    Raises PipelineRLError once it was started again more than `limit` times in a row and the newest commit is still
    the same. A start after that, by hand, begins to count anew, and so does another flow run: `pipelinerl resume`.
    """
    store = open_store(url)
    step = max(counted_commit_keys(store, read_epochs(store)), default=-1)
    now = StartsRecord(flow_run_id=flow_run_id, run_count=run_count, step=step)
    since = _read(store)
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
            "Look at why it crashes; Retry or `pipelinerl resume` goes on with it"
        )
    if tries > 0:
        logger.warning("no new commit %s; %s", where, restart_text(tries, limit))


def forget_drain(store: ObjectStore, flow_run_id: str) -> None:
    """A person who starts a run means it to run, whatever was wanted of the start before.

    The automation that resumes a crashed one means nothing: what an operator has drained ends as Drained then.
    """
    if wants_drain(store) and _was_resumed(flow_run_id):
        logger.info("asked to drain before the crash: no further step is taken")
    else:
        clear_drain_request(store)


def _was_resumed(flow_run_id: str) -> bool:
    try:
        return was_resumed(UUID(flow_run_id))
    except Exception as error:  # noqa: BLE001 (whatever the client raises: the run does not depend on it)
        logger.warning("cannot tell who has scheduled flow run %s (%s): a drain is forgotten", flow_run_id, error)
        return False


def _read(store: ObjectStore) -> StartsRecord | None:
    try:
        return read_record(store, STARTS_KEY, StartsRecord)
    except MissingObject:
        return None


def _write(store: ObjectStore, record: StartsRecord) -> None:
    store.put(STARTS_KEY, record.model_dump_json().encode())
