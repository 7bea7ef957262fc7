"""Small random decoders, and reference log-probabilities for engines: plain forward passes, token by token."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from pipelinerl_core.interfaces import Learner, ObjectStore
from pipelinerl_core.training.live_state import parts_of
from pipelinerl_core.types import Completion, Float32Array, WeightManifest
from pipelinerl_core.weights.checkpoint import load_checkpoint
from pipelinerl_core.weights.files import take_snapshot
from pipelinerl_core.weights.publish import WeightPublisher
from tests.snapshots import snapshot_of

VOCAB_SIZE = 19

_FAMILIES: dict[str, tuple[Any, Any]] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}


def tiny_model(
    family: str = "qwen2", seed: int = 0, *, tied: bool = True, scale: float = 3.0, **settings: Any
) -> Any:
    """A random two-layer decoder in evaluation mode; equal arguments give equal weights.

    scale: factor on all matrices; with the default, distributions are as uneven as in a trained model.
    """
    config_class, model_class = _FAMILIES[family]
    values = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config_class(**(values | settings)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    return model.eval()


def weights_of(model: Any) -> dict[str, Tensor]:
    """A copy of all weights by name."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def forcing_weights(model: Any, token: int) -> dict[str, Tensor]:
    """Weights for an untied model under which `token` has probability 1 after any prefix.

    Every embedding is a vector of ones and every layer adds zero. So the last hidden state is a vector of ones (the
    root mean square is 1), and the logits are 10 * hidden_size for `token` and 0 for all other tokens.
    """
    weights = weights_of(model)
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif name.endswith(("embed_tokens.weight", "norm.weight")):
            tensor.fill_(1.0)
    weights["lm_head.weight"].zero_()
    weights["lm_head.weight"][token] = 10.0
    return weights


@torch.no_grad()
def reference_logprobs(
    models: Mapping[int, Any],
    prompt: Sequence[int],
    completion: Completion,
    *,
    temperature: float = 1.0,
    recompute: bool = False,
) -> Float32Array:
    """Log-probabilities [C] of a completion by plain forward passes with transformers' own cache.

    models: weight version -> model with these weights. The version that sampled a token also computes the keys and
    values of the token before. recompute: build the cache again at every change of version.
    """
    versions = [span.version for span in completion.weight_spans for _ in range(span.start, span.end)]
    sequence = [*map(int, prompt), *map(int, completion.token_ids)]
    cache, num_fed, logprobs = DynamicCache(), 0, []
    for index, version in enumerate(versions):
        if recompute and index > 0 and version != versions[index - 1]:
            cache, num_fed = DynamicCache(), 0
        num_known = len(prompt) + index
        token_ids = torch.tensor([sequence[num_fed:num_known]])
        output = models[version](input_ids=token_ids, past_key_values=cache, use_cache=True)
        num_fed = num_known
        row = torch.log_softmax(output.logits[0, -1].float() / temperature, dim=-1)
        logprobs.append(float(row[sequence[num_known]]))
    return np.array(logprobs, np.float32)


def published_by(learner: Learner) -> Mapping[str, Tensor]:
    """A copy of the weights that a learner publishes; `Adapters` if it publishes adapters."""
    return take_snapshot(learner).tensors


def file_of(tensors: Mapping[str, Tensor]) -> bytes:
    """The bytes of a weights file."""
    return bytes(snapshot_of(tensors).data)


def publish(
    publisher: WeightPublisher, version: int, tensors: Mapping[str, Tensor], *, durable: bool, again: bool = False
) -> WeightManifest:
    """Publish some weights."""
    return publisher.publish(version, snapshot_of(tensors, publisher.memory), durable=durable, again=again)


def read_checkpoint(store: ObjectStore, step: int, epoch: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The whole tensors of a checkpoint, and its values. Asserts that no element is missing or there twice."""
    files, values = load_checkpoint(store, step, epoch)
    wholes: dict[str, Tensor] = {}
    counts: dict[str, Tensor] = {}
    for name, start, shape, values_N in parts_of(files):
        whole = wholes.setdefault(name, torch.empty(shape, dtype=values_N.dtype)).view(-1)
        whole[start : start + len(values_N)] = values_N
        counts.setdefault(name, torch.zeros_like(whole, dtype=torch.int64))[start : start + len(values_N)] += 1
    assert all((count == 1).all() for count in counts.values())
    return wholes, values


def state_of(learner: Learner) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A copy of a learner's state: tensors, and JSON values."""
    state = learner.state()
    state.detach()
    return dict(state.tensors), state.values
