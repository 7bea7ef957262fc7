"""Traces from the prompt to the step: selection of the traced groups, ids of spans, spans as data.

    group trace (run, group_id)                          step trace (run, step)
      group: lease .. accepted by the hub   [actor]        step: reserve .. committed        [trainer]
        generate: one per rollout, swaps as events           wait, compute, publish, commit  [trainer]
        reward:   one per rollout                            swap: announced .. sampling     [each actor]
        send                                                    ^
        ready: finished .. reserved         [trainer]           |
        optimizer_step  --------------------- link -------------+

Trace and span ids are hashes of names that all roles have, so messages carry no trace context.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

Value = str | int | float | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanRef:
    """Id of a span, for links and child spans."""

    trace_id: int
    """128 bits."""
    span_id: int
    """64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A moment inside a span."""

    name: str
    at: float
    """Unix seconds."""
    attributes: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A finished span."""

    name: str
    ref: SpanRef
    parent: SpanRef | None
    start: float
    """Unix seconds."""
    end: float
    attributes: Mapping[str, Value] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    links: tuple[SpanRef, ...] = ()


class SpanSink(Protocol):
    """Receives spans; does not block and does not raise."""

    def emit(self, span: Span) -> None:
        """Queue a span; dropped if the queue is full."""

    def close(self) -> None:
        """Export the queued spans, within 2 s."""


class Tracer:
    """Emits the spans of one process."""

    def __init__(self, run_id: str, share: float, sink: SpanSink) -> None:
        """share: of traced groups, in [0, 1]; every step is traced."""
        self._run_id = run_id
        self._limit = share * 2**64
        self._sink = sink

    def wants(self, group_id: int) -> bool:
        """Whether a group is traced; the same in every role."""
        return _number(8, "share", self._run_id, group_id) < self._limit

    def group(self, group_id: int, attempt: int, *path: str | int) -> SpanRef:
        """Id of the root span of an attempt at a group, or, with `path`, of a span below that span."""
        trace_id = _number(16, "group", self._run_id, group_id)
        return SpanRef(trace_id=trace_id, span_id=_number(8, "group", self._run_id, group_id, attempt, *path))

    def step(self, step: int, epoch: int, *path: str | int) -> SpanRef:
        """Id of the root span of a step of a trainer epoch, or, with `path`, of a span below that span."""
        trace_id = _number(16, "step", self._run_id, step)
        return SpanRef(trace_id=trace_id, span_id=_number(8, "step", self._run_id, step, epoch, *path))

    def emit(
        self,
        name: str,
        ref: SpanRef,
        parent: SpanRef | None,
        times: tuple[float, float],
        attributes: Mapping[str, Value],
        *,
        events: tuple[Event, ...] = (),
        links: tuple[SpanRef, ...] = (),
    ) -> None:
        """Emit a span from times[0] to times[1], Unix seconds; ends at times[0] if clocks of two hosts disagree."""
        start, end = times[0], max(times)
        named = {"pipelinerl.run": self._run_id, **{f"pipelinerl.{key}": value for key, value in attributes.items()}}
        self._sink.emit(
            Span(
                name=name, ref=ref, parent=parent, start=start, end=end, attributes=named, events=events, links=links
            )
        )

    def close(self) -> None:
        self._sink.close()


def _number(num_bytes: int, *names: str | int) -> int:
    """A hash of names, as an id of num_bytes bytes; never 0, which is not a valid id."""
    text = "/".join(str(name) for name in names)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=num_bytes).digest(), "big") or 1
