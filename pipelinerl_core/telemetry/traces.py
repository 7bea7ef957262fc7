"""Traces from the prompt to the step: which groups are traced, ids that every role derives alike, spans as data.

    group trace (run, group_id)                          step trace (run, step)
      group: lease .. accepted by the hub   [actor]        step: reserve .. committed        [trainer]
        generate: one per rollout, swaps as events           wait, compute, publish, commit  [trainer]
        reward:   one per rollout                            swap: heard .. sampling from it [each actor]
        send                                                    ^
        ready: finished .. reserved         [trainer]           |
        optimizer_step  --------------------- link -------------+

Nothing of it travels: trace and span ids are hashes of names that both sides know, so no message carries a context.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

Value = str | int | float | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanRef:
    """A place in a trace that others link to or hang below."""

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
    """Where spans go; never blocks and never raises."""

    def emit(self, span: Span) -> None:
        """Take a span; dropped when there are too many."""
        ...

    def close(self) -> None:
        """Write out what is left, within two seconds."""
        ...


class Tracer:
    """Of one process: what is traced, and how it is called."""

    def __init__(self, run_id: str, share: float, sink: SpanSink) -> None:
        """`share`: of the groups, in [0, 1]; every step is traced."""
        self._run_id = run_id
        self._limit = share * 2**64
        self._sink = sink

    def wants(self, group_id: int) -> bool:
        """Whether a group is traced; the same in every role."""
        return _number(8, "share", self._run_id, group_id) < self._limit

    def group(self, group_id: int, attempt: int, *what: str | int) -> SpanRef:
        """The root span of an attempt at a group, or something below it."""
        trace_id = _number(16, "group", self._run_id, group_id)
        return SpanRef(trace_id=trace_id, span_id=_number(8, "group", self._run_id, group_id, attempt, *what))

    def step(self, step: int, epoch: int, *what: str | int) -> SpanRef:
        """The root span of a step, as a trainer epoch took it, or something below it."""
        trace_id = _number(16, "step", self._run_id, step)
        return SpanRef(trace_id=trace_id, span_id=_number(8, "step", self._run_id, step, epoch, *what))

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
        """A span from times[0] to times[1], Unix seconds; clocks of two hosts may differ, a span never ends early."""
        start, end = times[0], max(times)
        named = {"pipelinerl.run": self._run_id, **{f"pipelinerl.{key}": value for key, value in attributes.items()}}
        self._sink.emit(
            Span(
                name=name, ref=ref, parent=parent, start=start, end=end, attributes=named, events=events, links=links
            )
        )

    def close(self) -> None:
        """Write out what is left."""
        self._sink.close()


def _number(num_bytes: int, *names: str | int) -> int:
    """A hash of names; 0 is no valid id."""
    text = "/".join(str(name) for name in names)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=num_bytes).digest(), "big") or 1
