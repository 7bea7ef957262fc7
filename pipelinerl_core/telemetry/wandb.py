"""Writes the metrics of a run to Weights & Biases, beside MLflow. wandb's own service process buffers and uploads."""

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.telemetry.mlflow import LOGGED_TAG, Status
from pipelinerl_core.telemetry.redact import flatten, redact
from pipelinerl_core.types import NO_STEP, LoggedStep

if TYPE_CHECKING:
    from pipelinerl_core.run.mlflow_run import RunTracker

logger = logging.getLogger(__name__)

INSTALL = "tracking.wandb=true needs the package wandb. Install it: pip install wandb"
_INIT_SECONDS = 30
_EVALUATED = "pipelinerl.evaluated"
_ROOM = 1_000_000  # steps; wandb's service has a buffer of its own, on disk


class WandbTracker:
    """Gives everything to another tracker and to a run of wandb, whose id is the run_id. An error after the start of
    the run ends the logging to wandb, and not the run."""

    def __init__(
        self,
        inner: "RunTracker",
        run_id: str,
        project: str,
        *,
        directory: Path,
        tags: Mapping[str, str],
        config: Mapping[str, object],
        has_inner: bool,
        is_required: bool,
    ) -> None:
        """Open the run, or continue it if wandb has it.

        directory: where wandb keeps its files. tags become part of wandb's configuration of the run. has_inner:
        `inner` knows which steps are logged; else wandb's summary tells. is_required: ConfigError if wandb refuses,
        for example without a login; else a warning.
        """
        self._inner = inner
        self._has_inner = has_inner
        self._table: tuple[Sequence[str], Sequence[Sequence[Any]]] | None = None
        self._run: Any = None
        self._logged = NO_STEP
        self._evaluated: dict[str, float | None] = {}
        """Metric and version of each evaluation that wandb has -> its end."""
        try:
            self._run = _init(run_id, project, directory, {**redact(flatten(config)), **redact(dict(tags))})
            self._logged, self._evaluated = self._last_logged(), self._last_evaluated()
        except Exception as error:  # noqa: BLE001 (whatever wandb's client raises)
            reason = f"wandb does not start: {str(error).strip().splitlines()[-1] if str(error) else repr(error)}"
            if is_required:
                raise ConfigError(f"tracking.wandb=true: {reason} Or set WANDB_MODE=offline") from None
            logger.warning("%s; this start of the run is not logged there", reason)
            self._run = None
        self._own_page: str | None = self._run.url if self._run and not self._run.offline else None

    @property
    def page(self) -> str | None:
        """Page of the run: MLflow's, which may be known later or change; else wandb's."""
        return self._inner.page or self._own_page

    @property
    def logged(self) -> LoggedStep | None:
        """Newest step that the other tracker has; without another tracker, that wandb has."""
        return self._inner.logged if self._has_inner else self._logged

    @property
    def room(self) -> int:
        """Metrics that the other tracker still takes."""
        return self._inner.room if self._has_inner else _ROOM

    def log(
        self, step: int, metrics: Mapping[str, float], *, at: float | None = None, weights_digest: str = ""
    ) -> None:
        """Give the metrics of a step to both; wandb's x axis is the metric `step`. It would keep equal points."""
        self._inner.log(step, metrics, at=at, weights_digest=weights_digest)
        values: dict[str, Any] = {**metrics, "step": step}
        name = f"{min(metrics, default='')}@{step}"
        if step <= self._logged.step if weights_digest else self._evaluated.get(name, math.nan) == at:
            return
        if weights_digest:
            self._logged = LoggedStep(step, weights_digest)
            self._quietly(lambda: self._run.summary.update({LOGGED_TAG: self._logged._asdict()}))
        else:
            self._evaluated[name] = at
            self._quietly(lambda: self._run.summary.update({_EVALUATED: json.dumps(self._evaluated)}))
        self._quietly(lambda: self._run.log(values))

    def start_over(self, step: int) -> None:
        """Begin a new MLflow run; in wandb the steps of both timelines stay in one run."""
        self._inner.start_over(step)
        self._logged, self._evaluated = NO_STEP, {}

    def log_artifact(self, name: str, data: bytes) -> None:
        """Give a file to the other tracker; a page is also shown by wandb."""
        self._inner.log_artifact(name, data)
        if name.endswith(".html"):
            self._quietly(lambda: self._run.log({name: _wandb().Html(data.decode(), inject=False)}))

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Give a table to the other tracker; wandb gets the newest one at the end, because it keeps every table."""
        self._inner.log_table(name, columns, rows)
        self._table = (columns, rows)

    def close(self, status: Status = "FINISHED", feed: Callable[[], bool] = lambda: True) -> None:
        """Close both. wandb uploads what it has; what it cannot upload stays in its directory for `wandb sync`."""
        self._inner.close(status, feed)
        if not self._has_inner:
            feed()
        self._quietly(lambda: self._finish(status))
        self._run = None

    def _finish(self, status: Status) -> None:
        if self._table:
            columns, rows = self._table
            text = [[value if isinstance(value, int | float | str) else str(value) for value in row] for row in rows]
            self._run.log({"rollouts": _wandb().Table(columns=list(columns), data=text)})
        self._run.finish(exit_code=0 if status == "FINISHED" else 1)

    def _last_logged(self) -> LoggedStep:
        kept = self._run.summary.get(LOGGED_TAG)
        return LoggedStep(int(kept["step"]), str(kept["weights_digest"])) if kept else NO_STEP

    def _last_evaluated(self) -> dict[str, float | None]:
        kept: dict[str, float | None] = json.loads(self._run.summary.get(_EVALUATED) or "{}")
        return kept

    def _quietly(self, action: Callable[[], None]) -> None:
        """The run does not depend on wandb, whatever its client raises."""
        if self._run is None:
            return
        try:
            action()
        except Exception as error:  # noqa: BLE001
            self._run = None
            logger.warning("wandb failed and gets no more metrics of this start: %s", error)


def check_wandb() -> None:
    """Raise ConfigError if the package is not installed."""
    if find_spec("wandb") is None:
        raise ConfigError(INSTALL)


def _wandb() -> ModuleType:
    """The package; imported late, because it is optional."""
    return import_module("wandb")


def _init(run_id: str, project: str, directory: Path, config: Mapping[str, object]) -> Any:
    """wandb's run. Nothing of the process is captured: no console, no code, no state of git."""
    check_wandb()
    wandb = _wandb()
    directory.mkdir(parents=True, exist_ok=True)
    settings = wandb.Settings(
        console="off", silent=True, disable_git=True, disable_code=True, init_timeout=_INIT_SECONDS
    )
    run = wandb.init(
        project=project, id=run_id, name=run_id, resume="allow", dir=str(directory), config=config, settings=settings
    )
    run.define_metric("*", step_metric="step")
    return run
