"""A small policy, rows to train it on, and the loss of a step in plain PyTorch."""

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from pipelinerl_core.batching.assemble import assemble_rows
from pipelinerl_core.batching.collate import PackBatcher
from pipelinerl_core.config.learners import TorchConfig
from pipelinerl_core.config.losses import ReinforceLoss
from pipelinerl_core.config.run import RunConfig
from pipelinerl_core.config.sections import RolloutsConfig
from pipelinerl_core.config.training import TrainerConfig
from pipelinerl_core.training.learner import TorchLearner
from pipelinerl_core.training.model import prepare_model
from tests.rollout_rows import build_rollout

TEMPERATURE = 0.8


def tiny_model(seed=0, **changes):
    torch.manual_seed(seed)
    settings = {
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
        "pad_token_id": 0,
    }
    return Qwen2ForCausalLM(Qwen2Config(**{**settings, **changes}))


def config(pack_tokens=2048, loss=ReinforceLoss(ratio_max=1.5), **learner):  # noqa: B008 (frozen)
    # A clip threshold nobody reaches leaves the gradients of the step as they are.
    return RunConfig(
        trainer=TrainerConfig(pack_tokens=pack_tokens),
        rollouts=RolloutsConfig(temperature=TEMPERATURE),
        loss=loss,
        learner=TorchConfig(**{"lr": 1e-4, "clip_norm": 1e9, **learner}),
    )


def learner_of(model, run_config, **kwargs):
    return TorchLearner(
        prepare_model(model), run_config, batcher=PackBatcher(run_config.trainer.pack_tokens), **kwargs
    )


def groups(num_groups=3, group_size=4, seed=0, longest=8):
    rng = np.random.default_rng(seed)
    return [
        [
            build_rollout(
                rng,
                group_id=group_id,
                rollout_index=index,
                num_tokens=int(rng.integers(1, longest + 1)),
                prompt_tokens=int(rng.integers(1, 7)),
                reward=float(rng.random()),
            )
            for index in range(group_size)
        ]
        for group_id in range(num_groups)
    ]


def rows_of(run_config, step=1, **kwargs):
    return assemble_rows(step, groups(**kwargs), run_config).rows


def plain_logprobs(model, rollout):
    """[C] by one unpacked forward of the whole sequence."""
    prompt, completion = rollout.prompt_token_ids, rollout.completion_token_ids
    ids = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64))
    logits = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
    logprobs = torch.log_softmax(logits, -1)
    return logprobs.gather(1, ids[len(prompt) :, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def plain_loss(model, rows, ratio_max):
    terms = []
    for row in rows:
        logprobs, _ = plain_logprobs(model, row.rollout)
        ratio = (logprobs.detach() - torch.from_numpy(row.rollout.rollout_logprobs)).exp().clamp(max=ratio_max)
        term = -(ratio * row.advantage * logprobs) * row.loss_weight
        terms.append(term[torch.from_numpy(row.loss_mask)].sum())
    return torch.stack(terms).sum()
