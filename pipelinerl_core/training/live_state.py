"""The state of a learner for a checkpoint, which is written while the learner computes the next step.

Forward and backward passes do not change the state, so the writer copies it in pieces beside them. Before the learner
changes the state, `detach` copies what the writer has not taken yet.
"""

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class LiveState:
    """Tensors that a learner owns, with the values that they have now. Thread-safe."""

    def __init__(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any], *, is_copied: bool = False) -> None:
        """values: JSON values. is_copied: the tensors are copies on the CPU already."""
        self.values = dict(values)
        self._tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        self._is_detached = is_copied
        self._lock = threading.Lock()

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors that were not taken; the learner may change them after `detach`."""
        return self._tensors

    @torch.no_grad()
    def take(self, targets: Mapping[str, Tensor]) -> None:
        """Copy the tensors of these names into `targets`, and forget them."""
        with self._lock:
            for name, target in targets.items():
                target.copy_(self._tensors.pop(name))

    def detach(self) -> None:
        """Copy the tensors that were not taken to the CPU: the learner is about to change its own."""
        with self._lock:
            if not self._is_detached:
                self._tensors = {name: tensor.to("cpu", copy=True) for name, tensor in self._tensors.items()}
            self._is_detached = True
