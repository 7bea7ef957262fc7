"""A loss of the user's own: `loss.function`."""

import torch

from pipelinerl_core.algo.losses.terms import LossSums, TrainedTokens
from pipelinerl_core.algo.own import own_function
from pipelinerl_core.config.losses import CustomLoss
from pipelinerl_core.errors import ConfigError


def custom(tokens: TrainedTokens, config: CustomLoss) -> LossSums:
    """The terms that function(tokens, **options) returns: [M] floating point, before the weights of the tokens.

    The function may return (terms, clipped) with clipped [M] bool, the tokens that it clips or leaves out. Raises
    ConfigError for any other result.
    """
    result = own_function(config.function)(tokens, **config.options)
    terms_M, clipped_M = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    shape = tokens.trainer_logprobs_M.shape
    if not isinstance(terms_M, torch.Tensor) or terms_M.shape != shape or not terms_M.is_floating_point():
        raise ConfigError(
            f"loss.function={config.function}: returned {_described(terms_M)}. Return a floating-point tensor with "
            f"one term per token, {list(shape)}"
        )
    if clipped_M is None:
        clipped_M = torch.zeros_like(terms_M, dtype=torch.bool)
    elif not isinstance(clipped_M, torch.Tensor) or clipped_M.shape != shape or clipped_M.dtype != torch.bool:
        raise ConfigError(
            f"loss.function={config.function}: returned {_described(clipped_M)} as clipped tokens. Return a tensor "
            f"of bool with one value per token, {list(shape)}"
        )
    return tokens.sums(terms_M, clipped_M)


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    return f"{type(value).__name__} {str(value)[:50]!r}"
