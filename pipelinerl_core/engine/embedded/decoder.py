"""A decoder model over slots: tokens in, float32 logits out, weights swapped between two passes.

Shape suffixes: S slots, R decoded slots, P prefilled sequences, T padded prefill length, N tokens of a pass,
K attended keys, C hidden size, V vocabulary.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from pipelinerl_core.algo.products import operand_dtype, product
from pipelinerl_core.engine.embedded.attention import Layout, SlotMemory
from pipelinerl_core.errors import EngineError, SwapError

IntArray = NDArray[np.int64]

# Padded tokens of one prefill pass: bounds the memory of activations and the time in which no slot decodes.
PREFILL_TOKENS = 4096
# A separate pass costs about as much as this many tokens, so a batch may have this much padding.
PADDING_TOKENS = 32

_ALIGNMENT = 64
# Settings of transformers models that scale or bend the logits outside of the head.
_LOGIT_SETTINGS = ("final_logit_softcapping", "logits_scaling", "logit_scale")


class StagedWeights(NamedTuple):
    """Weights that a decoder can use as they are."""

    tensors: Mapping[str, Tensor]
    head_VC: Tensor | None
    """The head in the type of the logits; None: the head stays."""


class SlotDecoder:
    """The model's own forward over a fixed number of slots.

    No other code may use the model: the constructor replaces its attention, and swaps its parameters.
    Raises EngineError unless the model is a decoder with full or sliding attention in all layers.
    """

    def __init__(self, model: Any, *, slots: int, max_len: int) -> None:
        _refuse_unsupported(model.config, max_len)
        self.model = model.eval()
        self.memory = SlotMemory(slots, max_len)
        self.memory.attach(model)
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self._base = model.get_decoder()
        self._head = model.get_output_embeddings()
        weight = next(model.parameters())
        self._dtype: torch.dtype = weight.dtype
        self.device: torch.device = weight.device
        self._key_range_K = torch.arange(max_len, device=self.device)
        self._slot_range_S = torch.arange(slots, device=self.device)
        self._nothing = torch.empty(0, dtype=torch.int64, device=self.device)
        self._parameters: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self._tied = {name: names for names in _aliases(self._parameters) for name in names}
        self._head_names = next(
            self._tied[name] for name, parameter in self._parameters.items() if parameter is self._head.weight
        )
        self._head_weight_VC = _head_operand(self._head.weight.detach())
        with torch.inference_mode():
            # One pass allocates the memory and finds unsupported arguments before the first request.
            self.decode(np.zeros(slots, np.int64), np.zeros(slots, np.int64), num_keys=1)
        if sorted(self.memory.keys) != list(range(model.config.num_hidden_layers)):
            raise EngineError(
                f"{len(self.memory.keys)} of {model.config.num_hidden_layers} layers of {type(model).__name__} go "
                "through transformers' attention interface; the embedded engine needs all of them"
            )

    def decode(
        self,
        token_ids_R: IntArray,
        positions_R: IntArray,
        *,
        num_keys: int,
        prefill: "tuple[IntArray, IntArray] | None" = None,
    ) -> Tensor:
        """Feed one token to each of the slots 0 .. R-1; returns float32 logits [R, V].

        num_keys, above every position: attended keys of each slot. `prefill` = (slots_P, token_ids_PT) stores these
        sequences, from position 0, in the same pass.
        """
        tokens_R, positions = self._put(token_ids_R), self._put(positions_R)
        is_hidden_RK = self._key_range_K[:num_keys] > positions[:, None]
        mask_RK = is_hidden_RK.new_zeros(is_hidden_RK.shape, dtype=self._dtype).masked_fill_(is_hidden_RK, -math.inf)
        layout = Layout(
            slots_R=self._slot_range_S[: len(token_ids_R)],
            positions_R=positions,
            mask_RK=mask_RK,
            prefill_slots_P=None if prefill is None else self._put(prefill[0]),
            prefill_length=0 if prefill is None else prefill[1].shape[1],
        )
        hidden_RC = self._forward(tokens_R, layout, prefill)[: len(token_ids_R)]
        return self._logits(hidden_RC)

    def prefill(self, slots_P: IntArray, token_ids_PT: IntArray) -> None:
        """Store sequences from position 0 without decoding."""
        layout = Layout(
            slots_R=self._nothing,
            positions_R=self._nothing,
            mask_RK=self._nothing,
            prefill_slots_P=self._put(slots_P),
            prefill_length=token_ids_PT.shape[1],
        )
        self._forward(self._nothing, layout, (slots_P, token_ids_PT))

    def check_rows_are_alike(self) -> None:
        """Raise EngineError unless this machine computes the same bits in every slot.

        All slots are fed the same tokens; matrix libraries may use other instructions for some rows of a matrix.
        """
        rows = self.memory.slots
        with torch.inference_mode():
            for position in range(min(4, self.memory.max_len)):
                token_ids_R = np.full(rows, position % self.vocab_size, np.int64)
                positions_R = np.full(rows, position, np.int64)
                logits_RV = self.decode(token_ids_R, positions_R, num_keys=self.memory.max_len)
                differing = int((logits_RV != logits_RV[0]).any(dim=1).sum())
                if differing:
                    raise EngineError(
                        f"engine.deterministic=true: this machine computes {differing} of {rows} slots differently "
                        "in the last bits, so results would depend on the slot. Try another engine.concurrency"
                    )

    def prepare(self, tensors: Mapping[str, Tensor], *, is_partial: bool = False) -> StagedWeights:
        """Check weights, and do all of a swap that the model can decode beside. Raises SwapError."""
        self.check(tensors, is_partial=is_partial)
        return self.stage(tensors)

    def check(self, tensors: Mapping[str, Tensor], *, is_partial: bool = False) -> None:
        """Raise SwapError unless `tensors` are all weights of this model, or some of them if is_partial.

        For tied weights (an embedding that is also the head) one of the two names is enough.
        """
        targets = self._parameters
        unknown = sorted(set(tensors) - set(targets))
        if unknown:
            raise SwapError(
                f"the update names {unknown[0]!r} ({len(unknown)} such), which is no weight of this model"
            )
        for name, tensor in tensors.items():
            target = targets[name]
            if tensor.shape != target.shape or tensor.dtype != target.dtype:
                raise SwapError(
                    f"{name}: the update is {tensor.dtype} {tuple(tensor.shape)}, the model has {target.dtype} "
                    f"{tuple(target.shape)}"
                )
        for names in _aliases(targets):
            given = [name for name in names if name in tensors]
            if not given and not is_partial:
                raise SwapError(f"the update lacks {names[0]!r}; it has {len(tensors)} of {len(targets)} weights")
            for name in given[1:]:
                if not torch.equal(tensors[given[0]], tensors[name]):
                    raise SwapError(f"{given[0]!r} and {name!r} are tied in this model but differ in the update")

    @property
    def has_to_copy(self) -> bool:
        """Whether `prepare` copies much, so that a thread should call it."""
        return self.device.type != "cpu" or operand_dtype(self._head.weight) != self._dtype

    def stage(self, tensors: Mapping[str, Tensor]) -> StagedWeights:
        """Everything that `load` needs of checked weights, while the model decodes: on its device, and the head."""
        placed = {name: _aligned(tensor.to(self.device)) for name, tensor in tensors.items()}
        head_VC = next((placed[name] for name in self._head_names if name in placed), None)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return StagedWeights(placed, None if head_VC is None else _head_operand(head_VC))

    @torch.no_grad()
    def load(self, staged: StagedWeights) -> list[Tensor]:
        """Let the model use staged weights, without a copy. Returns the replaced ones, for the caller to release."""
        replaced = [self._parameters[name].data for name in staged.tensors]
        for name, tensor in staged.tensors.items():
            for tied in self._tied[name]:
                self._parameters[tied].data = tensor
        if staged.head_VC is not None:
            replaced.append(self._head_weight_VC)
            self._head_weight_VC = staged.head_VC
        return replaced

    def _put(self, array: IntArray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _logits(self, hidden_RC: Tensor) -> Tensor:
        """[R, V], float32 sums of exact products, as in the learner."""
        weight_VC, bias = self._head_weight_VC, getattr(self._head, "bias", None)
        bias_V = None if bias is None else bias.float()
        if weight_VC.dtype == torch.float32:
            return functional.linear(hidden_RC.float(), weight_VC, bias_V)
        logits_RV = product(hidden_RC, weight_VC.T)
        return logits_RV if bias_V is None else logits_RV + bias_V

    def _forward(self, tokens_R: Tensor, layout: Layout, prefill: "tuple[IntArray, IntArray] | None") -> Tensor:
        tokens_N, positions_N = tokens_R, layout.positions_R
        if prefill is not None:
            tokens_PT = self._put(prefill[1])
            tokens_N = torch.cat((tokens_N, tokens_PT.flatten()))
            positions_N = torch.cat((positions_N, self._key_range_K[: tokens_PT.shape[1]].repeat(len(tokens_PT))))
        self.memory.layout = layout
        try:
            output = self._base(input_ids=tokens_N[None], position_ids=positions_N[None], use_cache=False)
        finally:
            self.memory.layout = None
        hidden_NC: Tensor = output.last_hidden_state[0]
        return hidden_NC


def prefill_batches(sequences: list[tuple[int, NDArray[np.int32]]]) -> list[tuple[IntArray, IntArray]]:
    """Pad (slot, token ids) pairs into batches (slots_P, token_ids_PT) of at most PREFILL_TOKENS padded tokens.

    Sorted by length, so that sequences of similar length share a batch, with at most PADDING_TOKENS of padding. A
    sequence longer than PREFILL_TOKENS is a batch of its own.
    """
    batches: list[tuple[IntArray, IntArray]] = []
    pending = sorted((pair for pair in sequences if len(pair[1])), key=lambda pair: -len(pair[1]))
    while pending:
        lengths = np.array([len(token_ids) for _, token_ids in pending])
        length = int(lengths[0])
        num_fitting = int(np.count_nonzero(np.cumsum(length - lengths) <= PADDING_TOKENS))
        count = max(1, min(PREFILL_TOKENS // length, num_fitting))
        batch, pending = pending[:count], pending[count:]
        tokens_PT = np.zeros((len(batch), length), np.int64)
        for row, (_, token_ids) in enumerate(batch):
            tokens_PT[row, : len(token_ids)] = token_ids
        batches.append((np.array([slot for slot, _ in batch], np.int64), tokens_PT))
    return batches


def _head_operand(weight_VC: Tensor) -> Tensor:
    """The head in the type of `SlotDecoder._logits`; without a copy if the head has this type."""
    return weight_VC.to(operand_dtype(weight_VC))


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor at an address of torch's alignment, which may choose the kernel and so its rounding."""
    return tensor if tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone()


def _aliases(targets: Mapping[str, Tensor]) -> list[list[str]]:
    """Names grouped by memory: tied weights are in one group."""
    groups: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    for name, tensor in targets.items():
        groups.setdefault((tensor.data_ptr(), tuple(tensor.shape)), []).append(name)
    return list(groups.values())


def _refuse_unsupported(config: Any, max_len: int) -> None:
    for layer_type in getattr(config, "layer_types", None) or ():
        if layer_type not in ("full_attention", "sliding_attention"):
            raise EngineError(
                f"the model has {layer_type!r} layers; the embedded engine has full and sliding attention only"
            )
    for name in _LOGIT_SETTINGS:
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise EngineError(
                f"the model sets {name}={getattr(config, name)}, which the embedded engine does not apply"
            )
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and max_len > limit:
        raise EngineError(f"max_len={max_len} is beyond the model's max_position_embeddings={limit}")
