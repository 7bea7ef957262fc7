"""A GPU without memory, as one line that names what to set."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from pipelinerl_core.algo.packed import PackedBatch
from pipelinerl_core.config.learners import LearnerConfig
from pipelinerl_core.config.run import RunConfig
from pipelinerl_core.errors import ConfigError, OutOfMemory

Watch = Callable[[Iterable[PackedBatch]], Iterator[PackedBatch]]


@contextmanager
def explain_out_of_memory(config: RunConfig, operation: str, *, is_first: bool = True) -> Iterator[Watch]:
    """Raise torch's error as one line about `operation`. Yields a function: packs that pass through it are named too.

    is_first: this process has not completed an optimizer step. Another start would fail in the same way: the error is
    a ConfigError, which is never retried. After a completed step the memory may be fragmented, and a restart helps:
    the error is OutOfMemory. If the step needs more memory than the GPU has, the next starts fail too: with
    ConfigError if the step is their first, otherwise until placement.max_restarts is reached.
    """
    longest = 0

    def watch(packs: Iterable[PackedBatch]) -> Iterator[PackedBatch]:
        nonlocal longest
        for batch in packs:
            longest = max(longest, len(batch.input_ids_T))
            yield batch

    try:
        yield watch
    except torch.OutOfMemoryError as error:
        kind = ConfigError if is_first else OutOfMemory
        raise kind(_text(config, operation, longest, str(error))) from error


def _text(config: RunConfig, operation: str, longest: int, cause: str) -> str:
    # torch's first sentences have the figures of the GPU; the sentences after them are about torch's allocator.
    figures = " ".join(cause.split()).partition(" Of the allocated memory")[0].removesuffix(".")
    packs = f", with packs of up to {longest:,} tokens" if longest else ""
    return f"trainer: {operation}{packs}: {figures}. Set {', or '.join(_remedies(config, longest))}"


def _remedies(config: RunConfig, longest: int) -> list[str]:
    """Settings that save memory and are not set, the cheapest first. longest: tokens of a pack, 0 without packs."""
    remedies = []
    pack_tokens, max_tokens = config.trainer.pack_tokens, config.rollouts.max_tokens
    if longest > pack_tokens:
        remedies.append(
            f"rollouts.max_tokens below {max_tokens} (a sequence longer than trainer.pack_tokens is one pack)"
        )
        if config.environment.path and longest > config.rollouts.max_prompt_tokens + max_tokens:
            remedies.append(
                f"environment.max_branches below {config.environment.max_branches} (the branches of a rollout are in "
                "one pack)"
            )
    elif longest:
        remedies.append(f"trainer.pack_tokens below {pack_tokens}")
    if longest and not config.checkpoints_activations("cuda"):
        remedies.append("learner.activation_checkpointing=true")
    state = _smaller_state(config.learner, config.trainer.ranks)
    changed = [f"learner.{key}={value}" for key, value in state.items() if getattr(config.learner, key) != value]
    return [*remedies, " ".join(changed) or "trainer.ranks higher"]


def _smaller_state(learner: LearnerConfig, num_ranks: int) -> dict[str, str | int]:
    """The next smaller way to store optimizer state, gradients and weights. One rank cannot shard them."""
    if num_ranks > 1 and learner.zero_stage < 3:
        return {"kind": "deepspeed", "zero_stage": 2 if learner.zero_stage < 2 else 3}
    if learner.offload == "none":
        return {"kind": "deepspeed", "zero_stage": max(2, learner.zero_stage), "offload": "optimizer"}
    return {"zero_stage": 3, "offload": "parameters"}
