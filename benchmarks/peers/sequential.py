"""The simplest trainer: generate a batch with transformers' `generate`, then take one optimizer step, in turn.

    python -m benchmarks.peers sequential --out DIR [--seed S] [--model DIR] [KEY=VALUE ...]

REINFORCE with the leave-one-out baseline of the group, normalised by tokens, on all cores, at a constant learning
rate after warm-up. A batch is padded, generated at once, and trained in one forward pass.

Shapes: B = rollouts, P = longest prompt, C = longest completion.
"""

import logging
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.peers.task import PeerTask, open_task, peer_parser
from pipelinerl_core.roles.runtime.process import configure_logging, exit_codes
from pipelinerl_core.types import Prompt

LEARNING_RATE = 1e-4
"""With this rate the model learns; with 3e-4 the model does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Prompts padded on the left, completions on the right."""

    token_ids_BS: Tensor
    attention_BS: Tensor
    sampled_BC: Tensor
    """True at sampled tokens, the end token included; False at padding."""
    rewards_B: Tensor


def train(task: PeerTask) -> None:
    """Train until the recorder ends the run."""
    config = task.config
    recorder = task.recorder("sequential", {"lr": LEARNING_RATE, "schedule": "constant after warm-up"})
    betas = (0.9, config.learner.beta2)
    optimizer = torch.optim.AdamW(
        task.model.parameters(), lr=LEARNING_RATE, betas=betas, weight_decay=0.0, fused=True
    )
    recorder.start(task.model)
    ended, step = False, 0
    while not ended:
        first = step * config.trainer.groups_per_step
        step += 1
        batch = generate(task, [task.prompt(first + index) for index in range(config.trainer.groups_per_step)])
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, step / max(1, config.learner.warmup_steps))
        optimizer.zero_grad()
        loss_of(task, batch).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(task.model.parameters(), config.learner.clip_norm)
        optimizer.step()
        ended = recorder.after_step(task.model, batch.rewards_B.mean().item())


@torch.no_grad()
def generate(task: PeerTask, prompts: list[Prompt]) -> Batch:
    """group_size completions of each prompt, with rewards."""
    rollouts = task.config.rollouts
    repeated = [prompt for prompt in prompts for _ in range(rollouts.group_size)]
    task.tokenizer.padding_side = "left"
    inputs = task.tokenizer([prompt.text for prompt in repeated], return_tensors="pt", padding=True).to(
        task.model.device
    )
    prompt_BP = inputs["input_ids"]
    token_ids_BS = task.model.generate(
        prompt_BP,
        attention_mask=inputs["attention_mask"],
        max_new_tokens=rollouts.max_tokens,
        do_sample=True,
        temperature=rollouts.temperature,
        top_k=0,
        top_p=1.0,
    )
    completion_BC = token_ids_BS[:, prompt_BP.shape[1] :]
    is_end_BC = (completion_BC == task.tokenizer.eos_token_id).long()
    sampled_BC = is_end_BC.cumsum(1) - is_end_BC == 0
    texts = task.tokenizer.batch_decode(completion_BC, skip_special_tokens=True)
    scores = [task.verify(text, prompt.task) for prompt, text in zip(repeated, texts, strict=True)]
    return Batch(
        token_ids_BS=token_ids_BS,
        attention_BS=torch.cat([inputs["attention_mask"], sampled_BC.long()], dim=1),
        sampled_BC=sampled_BC,
        rewards_B=torch.tensor(scores, device=token_ids_BS.device),
    )


def loss_of(task: PeerTask, batch: Batch) -> Tensor:
    """- advantage * log-probability, averaged over the sampled tokens of the batch."""
    group_size = task.config.rollouts.group_size
    rewards_GN = batch.rewards_B.view(-1, group_size)
    others_GN = (rewards_GN.sum(1, keepdim=True) - rewards_GN) / (group_size - 1)
    advantage_B = (rewards_GN - others_GN).view(-1)
    positions_BS = (batch.attention_BS.cumsum(1) - 1).clamp(min=0)
    num_completion = batch.sampled_BC.shape[1]
    logits_BCV = task.model(
        input_ids=batch.token_ids_BS,
        attention_mask=batch.attention_BS,
        position_ids=positions_BS,
        logits_to_keep=num_completion + 1,
        use_cache=False,
    ).logits[:, :-1]
    target_BC = batch.token_ids_BS[:, -num_completion:]
    logprobs_BC = torch.log_softmax(logits_BCV, -1).gather(-1, target_BC[..., None])[..., 0]
    return -(logprobs_BC * advantage_B[:, None])[batch.sampled_BC].mean()


@exit_codes
def main() -> int:
    """Command line."""
    configure_logging()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    train(open_task(peer_parser((__doc__ or "").splitlines()[0]).parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
