"""Predictions of all combinations of some settings, on two processes."""

import itertools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from pipelinerl_core.config import RunConfig
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.resolve import override_config
from pipelinerl_core.planning.prediction import Prediction, Source, predict
from pipelinerl_core.planning.what_if import ROWS, on_gpus
from pipelinerl_core.report.charts import Axis, Series, as_file, line_chart
from pipelinerl_core.supervision.fit import check_fit
from pipelinerl_core.telemetry.system import parse_number

_PROCESSES = 2
_COLOURS = ("generate", "train", "swap", "held", "commit", "bad")
"""Classes of report.css."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A combination of settings and its prediction."""

    overrides: tuple[str, ...]
    config: RunConfig | None
    """None if the combination is not valid."""
    prediction: Prediction | None
    error: str = ""
    """Why there is no prediction."""

    @property
    def rollouts_per_second(self) -> float:
        """Trained rollouts per second: comparable between settings with steps of different sizes."""
        if self.prediction is None or self.config is None:
            return -math.inf
        return (
            self.prediction.steps_per_second * self.config.trainer.groups_per_step * self.config.rollouts.group_size
        )


def sweep(
    source: Source,
    base: RunConfig,
    keys: Sequence[tuple[str, Sequence[str]]],
    *,
    gpus: int = 0,
    given: Sequence[str] = (),
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Point]:
    """Predict every combination. A combination that is not valid, or does not fit, has an error instead.

    given: names of settings that the user has set. Raises ConfigError if no combination has a prediction.
    """
    combinations = list(itertools.product(*([f"{key}={value}" for value in values] for key, values in keys)))
    fixed = {*given, *(key for key, _ in keys)}
    configs = [_config(base, combination, gpus, fixed) for combination in combinations]
    points = []
    with ProcessPoolExecutor(_PROCESSES, mp_context=get_context("spawn")) as pool:
        results = pool.map(_predict, itertools.repeat(source), configs)
        for overrides, config, result in zip(combinations, configs, results, strict=True):
            points.append(
                Point(
                    overrides=overrides,
                    config=config if isinstance(config, RunConfig) else None,
                    prediction=result if isinstance(result, Prediction) else None,
                    error=result if isinstance(result, str) else "",
                )
            )
            on_progress(len(points), len(combinations))
    if all(point.prediction is None for point in points):
        raise ConfigError(f"--sweep: no combination is possible; the first: {points[0].error}")
    return points


def best_of(points: Sequence[Point]) -> Point:
    """The point with the most trained rollouts per second; of points within 1 %, that with the smallest lag."""
    most = max(point.rollouts_per_second for point in points)
    close = [point for point in points if point.prediction and point.rollouts_per_second >= 0.99 * most]
    return min(close, key=lambda point: point.prediction.mean_lag if point.prediction else math.inf)


def sweep_document(points: Sequence[Point]) -> dict[str, Any]:
    """The table for `--json`."""
    best = best_of(points)
    rows = []
    for point in points:
        row: dict[str, Any] = {"settings": list(point.overrides), "error": point.error or None, "predicted": None}
        if point.prediction is not None and point.config is not None:
            row["predicted"] = point.prediction.document(point.config.trainer.steps)
            row["trainer_ranks"] = point.config.trainer.ranks
            row["rollouts_per_second"] = point.rollouts_per_second
        rows.append(row)
    return {"points": rows, "best": list(best.overrides)}


def sweep_lines(points: Sequence[Point]) -> list[str]:
    """The table as text; the best combination has a mark."""
    best = best_of(points)
    keys = [override.partition("=")[0] for override in points[0].overrides]
    has_ranks = len({point.config.trainer.ranks for point in points if point.config}) > 1
    head = [*keys, *(["trainer.ranks"] if has_ranks and "trainer.ranks" not in keys else [])]
    titles = [title for title, _ in ROWS.values()]
    rows = [[*head, "rollouts per second", *titles, "bottleneck"]]
    for point in points:
        values = [override.partition("=")[2] for override in point.overrides]
        if len(head) > len(keys):
            values.append(str(point.config.trainer.ranks) if point.config else "-")
        if point.prediction is None:
            rows.append([*values, f"not possible: {point.error}"])
            continue
        figures = [format(getattr(point.prediction, key), form) for key, (_, form) in ROWS.items()]
        mark = "  <- best" if point is best else ""
        rows.append([*values, f"{point.rollouts_per_second:.4g}", *figures, f"{point.prediction.bottleneck}{mark}"])
    full = [row for row in rows if len(row) == len(rows[0])]
    widths = [max(len(row[column]) for row in full) for column in range(len(rows[0]) - 1)]
    return [
        "  ".join([*(f"{text:>{width}}" for text, width in zip(cells, widths, strict=False)), last])
        for *cells, last in rows
    ]


def sweep_figure(points: Sequence[Point]) -> str:
    """A chart as SVG: rollouts per second by the first key, one line for each combination of the others."""
    key = points[0].overrides[0].partition("=")[0]
    first = list(dict.fromkeys(point.overrides[0].partition("=")[2] for point in points))
    is_number = all(parse_number(value) is not None for value in first)
    lines: dict[str, list[tuple[float, float]]] = {}
    for point in points:
        value = point.overrides[0].partition("=")[2]
        x = parse_number(value) if is_number else float(first.index(value))
        if point.prediction is not None and x is not None:
            lines.setdefault(", ".join(point.overrides[1:]), []).append((x, point.rollouts_per_second))
    series = [
        Series(name or "rollouts per second", values, _COLOURS[index % len(_COLOURS)])
        for index, (name, values) in enumerate(lines.items())
    ]
    axis = Axis(key if is_number else f"{key}: {', '.join(f'{i} {value}' for i, value in enumerate(first))}")
    chart = line_chart("predicted rollouts per second", series, axis, Axis("rollouts per second", low=0.0))
    return as_file(chart, series)


def _config(base: RunConfig, overrides: Sequence[str], gpus: int, fixed: set[str]) -> RunConfig | str:
    """The configuration of a combination, or why there is none."""
    try:
        config = on_gpus(override_config(base, overrides), gpus, fixed)
        check_fit(config)
        return config
    except ConfigError as error:
        return str(error)


def _predict(source: Source, config: RunConfig | str) -> Prediction | str:
    """In a process of the sweep: the prediction, or why there is none."""
    if isinstance(config, str):
        return config
    try:
        return predict(source, config)
    except ConfigError as error:
        return str(error)
