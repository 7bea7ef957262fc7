"""Weight spans: which version sampled which tokens of a completion."""

from collections.abc import Sequence

from pipelinerl_core.types import WeightSpan


def joined(spans: Sequence[WeightSpan], more: Sequence[WeightSpan]) -> list[WeightSpan]:
    """`spans` up to where `more` begins, then `more`; neighbours of one version become one."""
    if not more:
        return list(spans)
    result = clipped(spans, more[0].start)
    for span in more:
        if result and result[-1].version == span.version:
            result[-1] = WeightSpan(span.version, result[-1].start, span.end)
        elif span.end > span.start:
            result.append(span)
    return result


def clipped(spans: Sequence[WeightSpan], end: int) -> list[WeightSpan]:
    """The spans of the first `end` tokens."""
    return [WeightSpan(span.version, span.start, min(span.end, end)) for span in spans if span.start < end]
