"""The plain loop: generate the rollouts of a step, then take the step, in turn, on all cores.

    python -m benchmarks.peers sequential --out DIR [--seed S] [--preset smollm2] [KEY=VALUE ...]

REINFORCE with the leave-one-out baseline of the group, averaged over the sampled tokens. AdamW, learning rate, decay
and clipping follow the configuration, with float32 weights whatever model.dtype is. A group's prompt is computed once
for generation, finished rollouts leave the batch, and rollouts without advantage are not trained.

Shapes: B = rollouts, P = longest prompt, C = longest completion, S = P + C; L = rows of one forward pass.
"""

import itertools
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from benchmarks.peers.task import PeerTask, open_task, peer_parser
from pipelinerl_core.roles.runtime.process import configure_logging, exit_codes
from pipelinerl_core.training.optimizer import learning_rate, make_adam
from pipelinerl_core.types import Prompt

_MICRO_ROWS = 32
"""Rollouts of one forward and backward pass."""
_LIVE_SHARE = 0.8
"""Finished rollouts leave the batch when less than this share of it is unfinished: leaving copies the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Prompts padded on the left, completions on the right."""

    token_ids_BS: Tensor
    attention_BS: Tensor
    sampled_BC: Tensor
    """True at sampled tokens, the end token included; False at padding."""
    rewards_B: Tensor


class PlainLoop:
    """The weights in float32 and their optimizer, beside the model of the task."""

    def __init__(self, task: PeerTask) -> None:
        self._task = task
        self._parameters = list(task.model.parameters())
        self._masters = [parameter.detach().float().clone() for parameter in self._parameters]
        self._optimizer = make_adam(self._masters, task.config.learner)

    def step(self, number: int) -> Batch:
        """Generate the rollouts of step 1, 2, ... and train on them."""
        config, size = self._task.config, self._task.config.trainer.groups_per_step
        model = self._task.model
        batch = generate(self._task, [self._task.prompt((number - 1) * size + index) for index in range(size)])
        if model.dtype == torch.bfloat16 and model.device.type == "cpu":
            model.set_attn_implementation("eager")  # the backward pass of torch's kernel is slow there
        self._optimizer.param_groups[0]["lr"] = learning_rate(number, config.learner, config.trainer.steps)
        if backward(self._task, batch):
            self._update(config.learner.clip_norm)
        model.set_attn_implementation("sdpa")
        return batch

    @torch.no_grad()
    def _update(self, clip_norm: float) -> None:
        """Move the gradients to the float32 weights, take a step there, and copy the weights to the model."""
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self._masters, clip_norm)
        self._optimizer.step()
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            parameter.copy_(master)


def train(task: PeerTask) -> None:
    """Train until the recorder ends the run."""
    recorder = task.recorder("sequential", {"lr": task.config.learner.peak_lr})
    loop = PlainLoop(task)
    recorder.start(task.model)
    for number in itertools.count(1):
        batch = loop.step(number)
        if recorder.after_step(task.model, batch.rewards_B.mean().item()):
            return


@torch.no_grad()
def generate(task: PeerTask, prompts: Sequence[Prompt]) -> Batch:
    """group_size completions of each prompt, with rewards."""
    group_size, device = task.config.rollouts.group_size, task.model.device
    prompt_ids = [task.encode(prompt).tolist() for prompt in prompts]
    width = max(map(len, prompt_ids))
    padded = torch.tensor([[0] * (width - len(ids)) + ids for ids in prompt_ids], device=device)
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompt_ids], device=device)
    completions = _sample(task, padded, mask, group_size)
    longest = max(map(len, completions))
    completion_BC = torch.tensor([ids + [0] * (longest - len(ids)) for ids in completions], device=device)
    sampled_BC = torch.tensor([[at < len(ids) for at in range(longest)] for ids in completions], device=device)
    texts = task.tokenizer.batch_decode(completions, skip_special_tokens=True)
    repeated = [prompt for prompt in prompts for _ in range(group_size)]
    scores = [task.verify(text, prompt.task) for text, prompt in zip(texts, repeated, strict=True)]
    return Batch(
        token_ids_BS=torch.cat([padded.repeat_interleave(group_size, 0), completion_BC], dim=1),
        attention_BS=torch.cat([mask.repeat_interleave(group_size, 0), sampled_BC.long()], dim=1),
        sampled_BC=sampled_BC,
        rewards_B=torch.tensor(scores, device=device),
    )


def backward(task: PeerTask, batch: Batch) -> bool:
    """Add the gradient of the batch to that of the model; False if no rollout has an advantage."""
    rewards_GN = batch.rewards_B.view(-1, task.config.rollouts.group_size)
    num_others = rewards_GN.shape[1] - 1
    advantage_B = (rewards_GN - (rewards_GN.sum(1, keepdim=True) - rewards_GN) / num_others).flatten()
    chosen = advantage_B.nonzero()[:, 0]
    if not len(chosen):
        return False
    for rows_L in torch.split(chosen, _MICRO_ROWS):
        loss = -(_logprobs(task, batch, rows_L) * advantage_B[rows_L, None])[batch.sampled_BC[rows_L]].sum()
        torch.autograd.backward(loss / batch.sampled_BC.sum())
    return True


def _sample(task: PeerTask, prompts_GP: Tensor, mask_GP: Tensor, group_size: int) -> list[list[int]]:
    """Token ids of the completions, group_size of each prompt, in the order of the prompts."""
    rollouts, cache = task.config.rollouts, DynamicCache()
    logits = _next_logits(task.model, prompts_GP, mask_GP, cache).repeat_interleave(group_size, 0)
    mask = mask_GP.repeat_interleave(group_size, 0)
    cache.batch_repeat_interleave(group_size)
    completions: list[list[int]] = [[] for _ in range(len(mask))]

    def is_live(completion: list[int]) -> bool:
        return len(completion) < rollouts.max_tokens and (not completion or completion[-1] not in task.end_token_ids)

    batch = completions
    while True:
        tokens = torch.multinomial(torch.softmax(logits / rollouts.temperature, -1), 1)
        for completion, token_id in zip(batch, tokens[:, 0].tolist(), strict=True):
            if is_live(completion):
                completion.append(token_id)
        live = [at for at, completion in enumerate(batch) if is_live(completion)]
        if not live:
            return completions
        if len(live) < _LIVE_SHARE * len(batch):
            cache.batch_select_indices(torch.tensor(live, device=mask.device))
            batch, tokens, mask = [batch[at] for at in live], tokens[live], mask[live]
        mask = torch.cat([mask, torch.ones_like(tokens)], dim=1)
        logits = _next_logits(task.model, tokens, mask, cache)


def _next_logits(model: Any, ids: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
    """float32 logits of the token after each row of ids; mask: of all tokens, those in the cache included."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    outputs = model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1)
    logits: Tensor = outputs.logits[:, -1].float()
    return logits


def _logprobs(task: PeerTask, batch: Batch, rows_L: Tensor) -> Tensor:
    """[L, C] log-probabilities of the completions of some rollouts; padding included."""
    ids, attention = batch.token_ids_BS[rows_L], batch.attention_BS[rows_L]
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    num_completion = batch.sampled_BC.shape[1]
    logits_LCV = task.model(
        ids, attention_mask=attention, position_ids=positions, logits_to_keep=num_completion + 1, use_cache=False
    ).logits[:, :-1]
    logprobs = torch.log_softmax(logits_LCV.float() / task.config.rollouts.temperature, -1)
    return logprobs.gather(-1, ids[:, -num_completion:, None])[..., 0]


@exit_codes
def main() -> int:
    """Command line."""
    configure_logging()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    train(open_task(peer_parser((__doc__ or "").splitlines()[0]).parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
