"""Snapshots of given weights, without a learner."""

from pipelinerl_core.algo.adapters import Adapters
from pipelinerl_core.interfaces import WeightLayout
from pipelinerl_core.weights.files import lay_out, metas_of
from pipelinerl_core.weights.memory import private_memory


def snapshot_of(tensors, memory=private_memory):
    """A copy of some weights."""
    note = tensors.note if isinstance(tensors, Adapters) else None
    snapshot = lay_out(WeightLayout(metas_of(tensors), note), memory)
    for name, target in snapshot.tensors.items():
        target.copy_(tensors[name])
    return snapshot
