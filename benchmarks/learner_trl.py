"""The optimization part of TRL's GRPOTrainer, on given rollouts, for `bench learner`.

A step computes TRL's loss and a backward pass for every `ROWS_PER_PASS` rollouts, then clips gradients and applies
AdamW. Prompts are padded on the left and completions on the right, to the longest of the batch, as in TRL. TRL's
training loop, data loader and callbacks are not measured, in favour of TRL.

Shapes: B = rollouts, P = longest prompt, C = longest completion.
"""

import tempfile
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from pipelinerl_core.config.run import RunConfig
from pipelinerl_core.training.optimizer import make_adam
from pipelinerl_core.types import TrainingRow

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from trl import GRPOTrainer

    from benchmarks.peers.trl_grpo import grpo_config

# The fastest value on two cores for the rollouts of the quickstart (other values: benchmarks/peers/trl_grpo.py).
ROWS_PER_PASS = 128


class TRLStep:
    """One optimizer step on all rows."""

    def __init__(self, model: Any, rows: Sequence[TrainingRow], config: RunConfig) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="pipelinerl-bench-")
        self._model = model
        self._clip_norm = config.learner.clip_norm
        self._adam = make_adam(list(model.parameters()), config.learner)
        rows_per_pass = min(ROWS_PER_PASS, len(rows))
        self._trainer = _trainer(model, config, rows_per_pass, len(rows) // rows_per_pass, self._directory.name)
        self._passes = _passes(rows, rows_per_pass)
        self._trainer.current_gradient_accumulation_steps = len(self._passes)

    def __call__(self) -> None:
        self._model.train()
        self._adam.zero_grad()
        for inputs in self._passes:
            self._trainer._compute_loss(self._model, inputs).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip_norm)
        self._adam.step()


def _trainer(model: Any, config: RunConfig, rows_per_pass: int, num_passes: int, directory: str) -> Any:
    """With the objective of the learner."""
    tokenizer_class: Any = PreTrainedTokenizerFast
    words: Any = WordLevel({"<end>": 0, "<unknown>": 1}, unk_token="<unknown>")
    settings = grpo_config(
        config,
        directory,
        per_device_train_batch_size=rows_per_pass,
        gradient_accumulation_steps=num_passes,
    )
    return GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": "<end>"}] * config.trainer.groups_per_step),
        processing_class=tokenizer_class(
            tokenizer_object=Tokenizer(words), eos_token="<end>", pad_token="<end>", unk_token="<unknown>"
        ),
    )


def _passes(rows: Sequence[TrainingRow], rows_per_pass: int) -> list[dict[str, Tensor]]:
    """TRL's input tensors of the batch, one dictionary per pass."""
    prompts = [row.rollout.prompt_token_ids for row in rows]
    completions = [row.rollout.completion_token_ids for row in rows]
    prompt_ids_BP, prompt_mask_BP = _padded(prompts, left=True)
    completion_ids_BC, completion_mask_BC = _padded(completions, left=False)
    logprobs_BC, _ = _padded([row.rollout.rollout_logprobs for row in rows], left=False)
    whole = {
        "prompt_ids": prompt_ids_BP,
        "prompt_mask": prompt_mask_BP,
        "completion_ids": completion_ids_BC,
        "completion_mask": completion_mask_BC,
        "old_per_token_logps": logprobs_BC,
        "advantages": torch.tensor([row.advantage for row in rows], dtype=torch.float32),
    }
    num_items = completion_mask_BC.sum()
    return [
        {name: tensor[start : start + rows_per_pass] for name, tensor in whole.items()}
        | {"num_items_in_batch": num_items}
        for start in range(0, len(rows), rows_per_pass)
    ]


def _padded(values: Sequence[NDArray[Any]], *, left: bool) -> tuple[Tensor, Tensor]:
    width = max(map(len, values))
    is_float = np.issubdtype(values[0].dtype, np.floating)
    padded = np.zeros((len(values), width), np.float32 if is_float else np.int64)
    mask = np.zeros((len(values), width), np.int64)
    for index, sequence in enumerate(values):
        columns = slice(width - len(sequence), width) if left else slice(0, len(sequence))
        padded[index, columns], mask[index, columns] = sequence, 1
    return torch.from_numpy(padded), torch.from_numpy(mask)
