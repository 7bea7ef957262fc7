"""Builds a small character model without a download: tokenizer, initial weights, supervised warm start.

Shapes: T = packed tokens of a step, C = completion tokens of a step, V = vocabulary.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

from pipelinerl_core.algo.packed import layout_of
from pipelinerl_core.models.recipes import SumsModel
from pipelinerl_core.training.attention import PACKED_ATTENTION

PAD_ID, END_ID = 0, 1
PAD_TOKEN, END_TOKEN = "<pad>", "<eos>"
NUM_PACKS = 3
"""Packs of a step, sorted by length. Attention pads each pack to its longest row; more packs would be slower."""
MIN_LR_SHARE = 0.05
CLIP_NORM = 1.0
REPORT_STEPS = 50

Row = tuple[list[int], int]
"""Token ids of prompt and completion, and the number of prompt tokens."""


def build_model(
    recipe: SumsModel, pairs: Iterator[tuple[str, str]], directory: Path, report: Callable[[str], None]
) -> None:
    """Train on (prompt, completion) pairs and write model and tokenizer into `directory`.

    On machines of the same kind, the same recipe and pairs result in the same bytes: training uses one thread and the
    seed of the recipe. `report` receives a line of progress every REPORT_STEPS steps.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            model = Qwen2ForCausalLM(_model_config(recipe))  # type: ignore[no-untyped-call]
        _train(model, recipe, pairs, report)
    finally:
        torch.set_num_threads(num_threads)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model.save_pretrained(directory)
    build_tokenizer(recipe.alphabet).save_pretrained(directory)


def build_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character, decoded without separators; other characters raise an error."""
    tokenizer = Tokenizer(models.WordLevel(_vocabulary(alphabet)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        eos_token=END_TOKEN,
        clean_up_tokenization_spaces=False,
    )


def _vocabulary(alphabet: str) -> dict[str, int]:
    return {token: number for number, token in enumerate([PAD_TOKEN, END_TOKEN, *alphabet])}


def _model_config(recipe: SumsModel) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=len(_vocabulary(recipe.alphabet)),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        max_position_embeddings=recipe.max_positions,
        initializer_range=recipe.initializer_range,
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        eos_token_id=END_ID,
        bos_token_id=None,
    )


def _train(
    model: Qwen2ForCausalLM, recipe: SumsModel, pairs: Iterator[tuple[str, str]], report: Callable[[str], None]
) -> None:
    """AdamW on the mean cross-entropy of the completions; linear warm-up, then linear decay of the learning rate."""
    vocabulary = _vocabulary(recipe.alphabet)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, weight_decay=0.0, fused=True)
    started = time.monotonic()
    model.train()
    model.set_attn_implementation(PACKED_ATTENTION)
    for step in range(recipe.steps):
        rows = [_as_row(pair, vocabulary) for pair in itertools.islice(pairs, recipe.rows)]
        optimizer.param_groups[0]["lr"] = recipe.lr * _lr_share(step, recipe)
        loss = _backward(model, rows)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % REPORT_STEPS == 0 or step + 1 == recipe.steps:
            report(f"warm start: step {step + 1}/{recipe.steps} loss {loss:.3f}, {time.monotonic() - started:.0f} s")
    model.set_attn_implementation("sdpa")
    model.eval()  # type: ignore[no-untyped-call]


def _lr_share(step: int, recipe: SumsModel) -> float:
    return min(1.0, step / recipe.warmup_steps) * max(MIN_LR_SHARE, 1 - step / recipe.steps)


def _as_row(pair: tuple[str, str], vocabulary: dict[str, int]) -> Row:
    prompt, completion = pair
    return [vocabulary[letter] for letter in prompt + completion] + [END_ID], len(prompt)


def _backward(model: Qwen2ForCausalLM, rows: list[Row]) -> float:
    """Compute the mean loss over all completion tokens of the rows and its gradient; returns the loss."""
    rows = sorted(rows, key=lambda row: len(row[0]))
    num_tokens = sum(len(ids) - num_prompt for ids, num_prompt in rows)
    total = 0.0
    for pack in range(NUM_PACKS):
        some = rows[pack * len(rows) // NUM_PACKS : (pack + 1) * len(rows) // NUM_PACKS]
        if some:
            loss = _loss(model, some) / num_tokens
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
    return total


def _loss(model: Qwen2ForCausalLM, rows: list[Row]) -> Tensor:
    """Sum of the cross-entropy over completion tokens; only attention pads rows."""
    lengths = [len(ids) for ids, _ in rows]
    ids_T = torch.tensor(list(itertools.chain.from_iterable(ids for ids, _ in rows)))
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    rows_T = torch.arange(len(rows)).repeat_interleave(torch.tensor(lengths))
    prompts_T = torch.tensor([num_prompt for _, num_prompt in rows])[rows_T]
    targets_C = (positions_T >= prompts_T).nonzero().squeeze(1)
    output = model.model(
        input_ids=ids_T[None], position_ids=positions_T[None], use_cache=False, layout=layout_of(lengths)
    )
    logits_CV = model.lm_head(output.last_hidden_state[0, targets_C - 1])
    return functional.cross_entropy(logits_CV, ids_T[targets_C], reduction="sum")
