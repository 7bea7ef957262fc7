"""Loading a decoder of transformers for training on packs.

With DeepSpeed's ZeRO 3 the weights are divided among the ranks while transformers reads them. Each rank then has a
part of each tensor (`own_part`), and the model can compute only inside of DeepSpeed's engine.

Shapes: T = packed tokens, N = chosen tokens, C = hidden size, V = vocabulary.
"""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from pipelinerl_core.algo.packed import PackedBatch, PackLayout, layout_of
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.tiny import with_two_layers
from pipelinerl_core.training.attention import FLOAT32_ATTENTION, PACKED_ATTENTION
from pipelinerl_core.training.attention_choice import AttentionKind, Heads, choose_attention
from pipelinerl_core.training.model_files import check_tensors

# Largest difference of log-probabilities between a plain and a packed forward on a few tokens: rounding of the type.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5}
# Lengths of the compared sequences; different lengths, so that a wrong layout changes the result.
_CHECK_LENGTHS = (5, 3, 4)


def load_model(
    path: Path | str,
    dtype: Literal["float32", "bfloat16"],
    device: torch.device | str = "cpu",
    attention: AttentionKind = "auto",
    *,
    key: str = "model.path",
    dividing: AbstractContextManager[None] | None = None,
) -> Any:
    """The causal language model in the directory that `key` names, on a device, ready for `hidden_states`.

    Dropout is always off (eval mode): the importance ratio compares two policies, and dropout would change the ratio
    at equal weights.

    dividing: the block in which transformers divides the weights among the ranks (`divided_among`).

    Raises ConfigError if the directory has no model, if packs cannot reproduce what the model computes, or if the
    kind of attention does not work on the device.
    """
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(f"{key}={path}: no config.json there. Give the directory of a Hugging Face model")
    if dividing is not None and not any(Path(path).glob("*.safetensors")):
        raise ConfigError(
            f"{key}={path}: learner.zero_stage=3 reads safetensors, and the model has none. Save it with "
            "save_pretrained, or set learner.zero_stage=2"
        )
    # Onto a GPU without a copy in the host's memory, of which each rank would need one.
    place = {"": device} if torch.device(device).type != "cpu" and dividing is None else None
    try:
        with dividing or nullcontext():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path, dtype=getattr(torch, dtype), device_map=place, local_files_only=True, output_loading_info=True
            )
    except (EOFError, KeyError, ValueError, UnpicklingError) as error:  # damaged files; others may be transient
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"{key}={path}: cannot be loaded: {type(error).__name__}: {reason}") from None
    model, info = loaded
    check_tensors(model, info, f"{key}={path}")
    rank = dist.get_rank() if dist.is_initialized() else 0
    for name, weights in model.named_parameters():
        if not is_divided(weights):
            weights.data = weights.data.contiguous()  # a .bin file may have other strides; moments are views
        if not own_part(weights, rank).detach().sum(dtype=torch.float32).isfinite():
            raise ConfigError(f"{key}={path}: tensor {name} has values that are not finite. Take another model")
    compared = None
    if any(map(is_divided, model.parameters())):
        compared = _two_layers(model)
        _restore_buffers(model, compared, f"{key}={path}")
    return prepare_model(model.to(device), attention, compared)


def load_reference(
    path: Path | str, model: Any, attention: AttentionKind = "auto", *, key: str = "loss.ref_model"
) -> Any:
    """The frozen model in the directory that `key` names, with the type and on the device of `model`.

    Raises ConfigError if the directory has no model, or if the vocabulary sizes differ.
    """
    dtype: Literal["float32", "bfloat16"] = "bfloat16" if model.dtype is torch.bfloat16 else "float32"
    reference = load_model(path, dtype, model.device, attention, key=key).requires_grad_(False)
    sizes = reference.config.vocab_size, model.config.vocab_size
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"{key}={path}: {sizes[0]} tokens in the vocabulary, {sizes[1]} in the trained model's. "
            "Take a model with the same tokenizer"
        )
    return reference


def is_divided(parameter: Any) -> bool:
    """Whether DeepSpeed has divided a parameter among the ranks."""
    return hasattr(parameter, "ds_tensor")


def own_part(parameter: Any, rank: int) -> Tensor:
    """The values of a parameter that this rank has: all, or its part of a divided parameter, without padding."""
    part: Tensor = parameter
    if is_divided(parameter):
        part = parameter.ds_tensor
        part = part[: max(0, parameter.ds_numel - rank * part.numel())]
    return part


def whole_shape(parameter: Any) -> tuple[int, ...]:
    """The shape of a parameter, also if it is divided among the ranks."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def prepare_model(model: Any, attention: AttentionKind = "auto", compared: Any = None) -> Any:
    """Switch a transformers model to packed attention, in place. Raises ConfigError if log-probabilities change.

    compared: the model that is computed to see this, instead of a model whose weights are divided among the ranks.
    """
    model.eval()
    model.config.use_cache = False
    model.set_attn_implementation(_compared(model if compared is None else compared, attention))
    return model


def _two_layers(model: Any) -> Any:
    """A model of the same kind and width with two layers and random weights."""
    settings = type(model.config).from_dict(with_two_layers(model.config.to_dict()))
    with torch.random.fork_rng(devices=[]), model.device:
        return with_biases(type(model)._from_config(settings, dtype=model.dtype)).eval()


def _restore_buffers(model: Any, exact: Any, where: str) -> None:
    """Take buffers that no file has, for example the frequencies of positions, from another model of the same kind:
    DeepSpeed rounds them to bfloat16 while it divides the weights. Raises ConfigError for another buffer."""
    exact_buffers, stored = dict(exact.named_buffers()), model.state_dict()
    for name, buffer in model.named_buffers():
        if not buffer.is_floating_point() or name in stored:
            continue
        if name not in exact_buffers:
            raise ConfigError(f"{where}: learner.zero_stage=3 would round {name}. Set learner.zero_stage=2")
        buffer.data = exact_buffers[name].data.clone()


@torch.no_grad()
def with_biases(model: Any) -> Any:
    """The model with biases other than 0, with which transformers starts them: a bias that is left out is seen."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, device="cpu").to(parameter)
    return model


def _compared(model: Any, attention: AttentionKind) -> str:
    """The kind of attention for a model, which it sets. Raises ConfigError as `prepare_model`."""
    model.set_attn_implementation("sdpa")
    expected = [_plain_logprobs(model, ids) for ids in _check_sequences(model)]
    chosen = choose_attention(attention, _heads(model))
    # Float32 attention rounds differently from the plain forward in bfloat16. The check is about the model, so both
    # sides of the comparison attend in bfloat16.
    model.set_attn_implementation(PACKED_ATTENTION if chosen == FLOAT32_ATTENTION else chosen)
    with torch.no_grad():
        packed = _packed_logprobs(model)
    difference = max((own - wanted).abs().max().item() for own, wanted in zip(packed, expected, strict=True))
    tolerance = _TOLERANCE.get(model.dtype, 0.0)
    if not difference <= tolerance:
        raise ConfigError(
            f"{type(model).__name__}: log-probabilities of packed sequences differ by {difference:.3g} from a plain "
            f"forward (at most {tolerance:g}); the model scales its logits, has a bias in its head, or attends in a "
            "way that is not supported. Take a decoder with causal attention and a plain linear head"
        )
    return chosen


def _heads(model: Any) -> Heads:
    config = model.config
    return Heads(
        num=config.num_attention_heads,
        num_kv=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        size=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        dtype=model.dtype,
        device=model.device,
    )


def check_gradient(model: Any) -> None:
    """Train one step on a few tokens of a prepared model. Raises ConfigError if a gradient is not finite."""
    loss = torch.cat([logprobs_TV[:, 0] for logprobs_TV in _packed_logprobs(model)]).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if not gradients or not all(gradient.isfinite().all() for gradient in gradients):
        raise ConfigError(f"{type(model).__name__}: the gradient is not finite")


def checkpoint_activations(model: Any) -> None:
    """Keep only the input of each layer for the backward pass, which computes the rest again: less memory, more time.

    transformers checkpoints a layer whose attribute `training` is True. Only the layer's own attribute is set, not
    the attributes of its submodules, so dropout stays off.
    """
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.training = True
            if isinstance(getattr(layer, "dropout", None), float):
                setattr(layer, "dropout", 0.0)  # noqa: B010 - OPT's layer calls dropout itself


def head_weight(model: Any) -> Tensor:
    """[V, C] weight of the output layer."""
    weight: Tensor = model.get_output_embeddings().weight
    return weight


def hidden_states(model: Any, batch: PackedBatch) -> Tensor:
    """[N, C] last hidden states that predict the sampled tokens of a pack."""
    return _packed_forward(model, batch.input_ids_T, batch.position_ids_T, batch.layout).index_select(
        0, batch.source_N
    )


def _packed_forward(model: Any, input_ids_T: Tensor, position_ids_T: Tensor, layout: PackLayout) -> Tensor:
    output = model.base_model(
        input_ids=input_ids_T[None],
        position_ids=position_ids_T[None],
        attention_mask=None,
        use_cache=False,
        layout=layout,
    )
    hidden_TC: Tensor = output.last_hidden_state[0]
    return hidden_TC


def _check_sequences(model: Any) -> list[Tensor]:
    ids = torch.arange(sum(_CHECK_LENGTHS)) * 7 % model.config.vocab_size
    return list(ids.split(list(_CHECK_LENGTHS)))


@torch.no_grad()
def _plain_logprobs(model: Any, ids: Tensor) -> Tensor:
    return torch.log_softmax(model(input_ids=ids[None].to(model.device)).logits[0].float(), -1)


def _packed_logprobs(model: Any) -> list[Tensor]:
    sequences, layout = _check_sequences(model), layout_of(_CHECK_LENGTHS).to(model.device)
    positions_T = torch.cat([torch.arange(length) for length in _CHECK_LENGTHS])
    hidden_TC = _packed_forward(model, torch.cat(sequences).to(model.device), positions_T.to(model.device), layout)
    logits_TV = hidden_TC.float() @ head_weight(model).float().T
    return list(torch.log_softmax(logits_TV, -1).split(list(_CHECK_LENGTHS)))  # type: ignore[no-untyped-call]
