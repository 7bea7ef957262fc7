"""Traits of the kinds of engines, learners, schedules and transports: what all other code asks about a kind.

The section of a kind has `traits`. Only this file and the tables that build a kind (engine/load.py,
roles/trainer/learners.py, ledger/schedules.py) name kinds; `tests/unit/config/test_kinds.py` finds other comparisons.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

EngineKind = Literal["embedded", "vllm"]
LearnerKind = Literal["torch", "deepspeed"]
ScheduleKind = Literal["pipeline", "conventional", "april"]
Transport = Literal["shm", "object_store", "nccl"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTraits:
    """Traits of an `engine.kind`."""

    package: str = ""
    """Optional package that the engine needs; INSTALL has the error of a host without the package. Empty: none."""
    has_workers: bool = False
    """Computes in processes of its own, over several devices, on a GPU unless told otherwise; they receive broadcasts
    and take merged models from shared memory. A second engine takes minutes to start."""
    has_clock: bool = False
    """Decode steps can be slowed down: for the pace of the trainer and for emulated accelerators."""
    fixes_shapes: bool = False
    """Has engine.deterministic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerTraits:
    """Traits of a `learner.kind`."""

    package: str = ""
    """As in EngineTraits."""
    splits_state: bool = False
    """Splits weights, gradients and optimizer over the ranks (learner.zero_stage, learner.offload), with one float32
    sum of gradients and float32 master weights. Needs a process group also with one rank."""
    plans_packs: bool = False
    """Chooses a backward pass for each pack, and can score rollouts under earlier versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleTraits:
    """Traits of a `schedule.kind`."""

    takes_turns: bool = True
    """Engines pause while the trainer steps."""
    has_phases: bool = False
    """Has schedule.steps_per_phase."""
    leases_more: bool = False
    """Leases schedule.alpha times the groups of a step, and pauses the unfinished groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportTraits:
    """Traits of a `weights.transport`."""

    uses_shared_memory: bool = False
    """Versions lie in the shared memory of one host."""
    is_broadcast: bool = False
    """Versions go from the trainer's memory to the workers of engines, which load them without merging."""


ENGINE_TRAITS: Mapping[EngineKind, EngineTraits] = MappingProxyType(
    {
        "embedded": EngineTraits(has_clock=True, fixes_shapes=True),
        "vllm": EngineTraits(package="vllm", has_workers=True),
    }
)
LEARNER_TRAITS: Mapping[LearnerKind, LearnerTraits] = MappingProxyType(
    {
        "torch": LearnerTraits(plans_packs=True),
        "deepspeed": LearnerTraits(package="deepspeed", splits_state=True),
    }
)
SCHEDULE_TRAITS: Mapping[ScheduleKind, ScheduleTraits] = MappingProxyType(
    {
        "pipeline": ScheduleTraits(takes_turns=False),
        "conventional": ScheduleTraits(has_phases=True),
        "april": ScheduleTraits(leases_more=True),
    }
)
TRANSPORT_TRAITS: Mapping[Transport, TransportTraits] = MappingProxyType(
    {
        "shm": TransportTraits(uses_shared_memory=True),
        "object_store": TransportTraits(),
        "nccl": TransportTraits(is_broadcast=True),
    }
)
INSTALL: Mapping[str, str] = MappingProxyType(
    {
        "vllm": "engine.kind=vllm: vLLM is not installed. Run `make install ENGINE=vllm` (CPU) or "
        "`pip install -e '.[vllm]'` (GPU), or set engine.kind=embedded",
        "deepspeed": "learner.kind=deepspeed: DeepSpeed is not installed. Run `make install LEARNER=deepspeed`, or "
        "set learner.kind=torch (all weights on each rank)",
    }
)
"""Package -> the error of a host without the package."""
