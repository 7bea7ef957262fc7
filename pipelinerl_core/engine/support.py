"""Whether an engine can compute the architecture of a model, by `engine.kind`; tried before any role starts."""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from pipelinerl_core.errors import EngineError

_TOKENS = np.arange(1, 9)
"""A sequence that is longer than the sliding window of a small model."""
_PREFILLED = 5
_TOLERANCE = 1e-3


def _embedded(model: Any) -> None:
    """Decode a sequence in a slot. Raises EngineError if the logits differ from a plain forward of the model."""
    from pipelinerl_core.engine.embedded.decoder import SlotDecoder

    with torch.inference_mode():
        wanted_TV = model(input_ids=torch.from_numpy(_TOKENS)[None], use_cache=False).logits[0].float()
        decoder = SlotDecoder(model, slots=2, max_len=len(_TOKENS))
        decoder.prefill(np.array([0]), _TOKENS[None, :_PREFILLED])
        for position in range(_PREFILLED, len(_TOKENS)):
            tokens_R, positions_R = _TOKENS[position : position + 1], np.array([position])
            logits_RV = decoder.decode(tokens_R, positions_R, num_keys=position + 1)
            difference = (logits_RV[0] - wanted_TV[position]).abs().max().item()
            if not difference <= _TOLERANCE:
                raise EngineError(
                    f"with slots the logits differ by {difference:.2g} from a plain forward (at most {_TOLERANCE:g})"
                )


def _vllm(model: Any) -> None:
    """Raises EngineError if the installed vLLM has no class for the model."""
    if find_spec("vllm") is None:
        return  # on a work pool
    from vllm.model_executor.models.registry import ModelRegistry

    name = type(model).__name__
    if name not in ModelRegistry.get_supported_archs():
        raise EngineError(f"the installed vLLM has no model class {name}. Set engine.kind=embedded")


SUPPORT: Mapping[str, Callable[[Any], None]] = MappingProxyType({"embedded": _embedded, "vllm": _vllm})
"""engine.kind -> raises an error, its reason, if the engine cannot compute a small model."""
