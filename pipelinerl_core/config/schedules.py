"""The kinds of schedules: the keys of each `schedule.kind`, and what other code asks about it.

The text below a field is its help.

To add a schedule: a section here and its line in ScheduleConfig, and its decisions in ledger/schedules.py.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from pipelinerl_core.config.section import Section, default_kind


class ScheduleSection(Section):
    """When groups are leased, trained and dropped (docs/scheduling.md): the keys of every kind."""

    takes_turns: ClassVar[bool] = True
    """Engines pause while the trainer steps."""
    has_phases: ClassVar[bool] = False
    """Has steps_per_phase."""
    leases_more: ClassVar[bool] = False
    """Leases alpha times the groups of a step, and pauses the unfinished groups."""

    max_lag: int = Field(4, ge=0)
    """Largest lag of a trained token: optimizer steps between its weights and the weights being trained; 0:
    synchronous training. Raise for throughput, lower for more on-policy data."""
    stale: Literal["mask", "drop", "wait"] = "mask"
    """Tokens beyond max_lag. mask: mask the tokens out of the loss; drop: drop the whole group; wait: the trainer
    waits for groups that would become stale, at most wait_seconds per step, then masks."""
    wait_seconds: float = Field(5.0, gt=0)
    """stale=wait: seconds that one optimizer step waits at most."""


class PipelineSchedule(ScheduleSection):
    """Generation and training run at the same time."""

    takes_turns: ClassVar = False
    alpha: ClassVar[float] = 1.0
    steps_per_phase: ClassVar[int] = 1

    kind: Literal["pipeline"] = "pipeline"
    """pipeline: generation and training run at the same time; conventional: they alternate, steps_per_phase optimizer
    steps at a time; april: they alternate, with more groups in flight than a step needs; unfinished groups continue
    after the step."""


class ConventionalSchedule(ScheduleSection):
    """Generation and training alternate."""

    has_phases: ClassVar = True
    alpha: ClassVar[float] = 1.0

    kind: Literal["conventional"] = "conventional"
    steps_per_phase: int = Field(1, ge=1)
    """Optimizer steps per generation phase; at most max_lag + 1. Raise for fewer phases, at more lag."""


class AprilSchedule(ScheduleSection):
    """Generation and training alternate, with more groups in flight than a step needs (APRIL)."""

    leases_more: ClassVar = True
    steps_per_phase: ClassVar[int] = 1

    kind: Literal["april"] = "april"
    alpha: float = Field(1.5, ge=1)
    """Groups in flight or ready after each step, as a multiple of groups_per_step; at most max_lag + 1. Raise if
    engines run out of sequences before a step's groups are complete."""


ScheduleConfig = Annotated[
    PipelineSchedule | ConventionalSchedule | AprilSchedule,
    Field(discriminator="kind"),
    BeforeValidator(default_kind("pipeline")),
]
