"""Names of weights in a model's files, which vLLM loads, for weights with the learner's names.

transformers computes with some weights in another form than in the files, for example with all experts of a layer in
one tensor. A published version has the learner's names and tensors; vLLM loads the names and shapes of the files.
"""

from collections.abc import Collection, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from pipelinerl_core.errors import EngineError
from pipelinerl_core.models.paths import weight_files


class FileNames:
    """Converts weights of one model directory, a tensor at a time."""

    def __init__(self, model: Path, known: Collection[str]) -> None:
        """known: names that need no conversion: those in the files."""
        self._model = model
        self._known = known

    def converted(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors as in the files; a name that transformers does not convert stays."""
        for name, tensor in tensors:
            if name in self._known:
                yield name, tensor
            else:
                yield from self._revert(name, tensor)

    def _revert(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        from transformers.core_model_loading import revert_weight_conversion

        yield from revert_weight_conversion(self._empty_model, {name: tensor}).items()

    @cached_property
    def _empty_model(self) -> Any:
        """The model without memory for its weights; transformers finds the conversions by it."""
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(self._model)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]


def file_shapes(model: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every weight of a model directory, from the headers of its files."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in weight_files(model):
        with safe_open(path, framework="pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    if not shapes:
        raise EngineError(f"{model}: no weights in safetensors files")
    return shapes
