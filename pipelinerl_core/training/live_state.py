"""The state of a learner for a checkpoint, which is written while the learner computes the next step.

Forward and backward passes do not change the state, so the writer copies it in pieces beside them. Before the learner
changes the state, `detach` copies what the writer has not taken yet.

A rank that has only a part of a tensor writes its part: the elements from `start`, as a flat tensor with the name
`<tensor>[<start> of <shape>]`. Example: `weights.model.norm.weight[448 of 896]`.

Shapes: N = elements of a part.
"""

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipelinerl_core.types import FileEntry

_PART = re.compile(r"(.+)\[(\d+) of (\d+(?:x\d+)*)\]")


class StatePart(NamedTuple):
    """Some elements of a tensor of a checkpoint, or all."""

    name: str
    """Of the tensor."""
    start: int
    """Position of the first element in the flat tensor."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    values_N: Tensor


def part_key(name: str, start: int, shape: Sequence[int]) -> str:
    """The name of a part of a tensor."""
    return f"{name}[{start} of {'x'.join(map(str, shape))}]"


def parts_of(files: Iterable[Mapping[str, Tensor]]) -> Iterator[StatePart]:
    """The parts in the files of a checkpoint."""
    for tensors in files:
        yield from _parts_in(tensors)
        del tensors  # before the next file is read


def _parts_in(tensors: Mapping[str, Tensor]) -> Iterator[StatePart]:
    for key, tensor in tensors.items():
        if (match := _PART.fullmatch(key)) is None:
            yield StatePart(key, 0, tuple(tensor.shape), tensor.reshape(-1))
        else:
            yield StatePart(match[1], int(match[2]), tuple(map(int, match[3].split("x"))), tensor)


class LiveState:
    """Tensors that a learner owns, with the values that they have now. Thread-safe."""

    def __init__(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """values: JSON values."""
        self.values = dict(values)
        self.written_elsewhere: Callable[[str], Sequence[FileEntry]] = lambda _: ()
        """Waits for the files that other ranks write below a prefix."""
        self._tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        self._is_detached = False
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
