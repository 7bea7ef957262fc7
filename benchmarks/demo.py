"""CPU seconds of each part of a step of the demonstration, preset smollm2, beside bare loops in the same data type.

Run: `pipelinerl prepare --model builtin:smollm2` once (docs/demo.md), then `python -m benchmarks demo [--json]`, with
overrides of the preset such as `model.dtype=float32`. One process, one compute thread; the contestants take turns.
Seconds are medians over rounds (of a version the fastest), ratios are medians of each round's ratio. Generation: 64
prompts, 16 tokens each, without end tokens. Training: these 64 rollouts; forward, backward, and AdamW on float32
weights. Version: from the learner into the engine; a bare loop has none.
"""

import asyncio
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks import report, swap
from benchmarks.engine_load import count_tokens, random_rollout
from benchmarks.learner_rounds import in_turns
from pipelinerl_core.batching.assemble import assemble_rows
from pipelinerl_core.config import RunConfig
from pipelinerl_core.engine.embedded.engine import EmbeddedEngine
from pipelinerl_core.models.paths import require_model
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.prompts import build_source
from pipelinerl_core.roles.runtime.inference import build_codec
from pipelinerl_core.roles.runtime.process import exit_codes
from pipelinerl_core.roles.trainer.learners import pack_batcher
from pipelinerl_core.training.learner import TorchLearner
from pipelinerl_core.training.model import load_model
from pipelinerl_core.types import Int32Array, TrainingRow

MAX_TOKENS = 16
_MICRO_ROWS = 32
"""Rows of one forward pass of the bare loop."""


@exit_codes
def main() -> int:
    """Print a table, or one JSON document with --json."""
    parser = report.parser(__doc__)
    parser.add_argument("overrides", nargs="*", help="section.key=value, as of `pipelinerl train smollm2`")
    parser.add_argument("--rounds", type=int, default=3, help="rounds after the first, which warms up")
    options = parser.parse_args()
    result = measure(options.rounds, options.overrides)
    report.write(result, table, as_json=options.json)
    return 0


def measure(rounds: int, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """CPU seconds of the parts, their ratios to the bare loops, and the conditions."""
    config = load_config("smollm2", overrides)
    torch.set_num_threads(1)
    prompts = _prompts(config)
    completions = np.random.default_rng(0).integers(1000, 40_000, (len(prompts), MAX_TOKENS)).astype(np.int32)
    rows = _rows(config, prompts, completions)
    generation = _compare(
        {"embedded engine": _embedded(config, prompts), "transformers.generate": _generate(config, prompts)}, rounds
    )
    training = _compare(
        {"learner": _learner(config, rows), "bare loop": _BareLoop(config, prompts, completions, rows)}, rounds
    )
    version = swap.measure(config, versions=rounds)
    version_seconds = sum(version[f"{stage}_seconds"] for stage in ("copy", "publish", "take"))
    parts = {"generation": generation, "training": training}
    own, bare = (sum(list(part["cpu_seconds"].values())[index] for part in parts.values()) for index in (0, 1))
    return {
        "dtype": config.dtype,
        **parts,
        "version": {"cpu_seconds": {"copy, publish, fetch, stage": round(version_seconds, 3)}},
        "step_ratio": round((own + version_seconds) / bare, 2),
        "rounds": rounds,
        "torch": torch.__version__,
        **report.machine(),
    }


def table(result: dict[str, Any]) -> str:
    """The measurement as Markdown."""
    rows = [
        (part, name, seconds, f"{result[part]['ratio']:.2f}" if index == 0 and "ratio" in result[part] else "")
        for part in ("generation", "training", "version")
        for index, (name, seconds) in enumerate(result[part]["cpu_seconds"].items())
    ]
    rows.append(("step", "sum", "", f"{result['step_ratio']:.2f}"))
    conditions = f"{result['dtype']}, 1 thread, medians of {result['rounds']} rounds; {report.conditions(result)}"
    header = ("part", "contestant", "CPU s", "over the bare loop")
    return "\n".join([conditions, "", *report.markdown(header, rows, num_text_columns=2), ""])


def _compare(contestants: dict[str, Callable[[], object]], rounds: int) -> dict[str, Any]:
    """The first contestant is this project's, the second is bare."""
    timings = in_turns(contestants, rounds)
    seconds = {name: [cpu_seconds for _, cpu_seconds in of_rounds] for name, of_rounds in timings.items()}
    ours, bare = seconds.values()
    return {
        "cpu_seconds": {name: round(statistics.median(of_rounds), 3) for name, of_rounds in seconds.items()},
        "ratio": round(statistics.median(own / theirs for own, theirs in zip(ours, bare, strict=True)), 2),
    }


def _prompts(config: RunConfig) -> Int32Array:
    """[64, P] token ids, eight times each of eight prompts of equal length."""
    source, codec = build_source(config), build_codec(config)
    encoded = [codec.encode(source.prompt(index)) for index in range(config.trainer.groups_per_step)]
    return np.repeat(np.stack(encoded), config.rollouts.group_size, axis=0)


def _rows(config: RunConfig, prompts: Int32Array, completions: Int32Array) -> list[TrainingRow]:
    size, rollouts = config.rollouts.group_size, []
    for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        rollouts.append(random_rollout(prompt, completion, -10.0, group=index // size, index=index % size, size=size))
    return assemble_rows(1, [rollouts[at : at + size] for at in range(0, len(rollouts), size)], config).rows


def _embedded(config: RunConfig, prompts: Int32Array) -> Callable[[], object]:
    engine = EmbeddedEngine(
        _model(config, "sdpa"), slots=len(prompts), max_len=prompts.shape[1] + MAX_TOKENS, eos_token_ids=()
    )
    return lambda: asyncio.run(count_tokens(engine, prompts, max_tokens=MAX_TOKENS))


def _generate(config: RunConfig, prompts: Int32Array) -> Callable[[], object]:
    model = _model(config, "sdpa")
    ids = torch.from_numpy(prompts.astype(np.int64))
    return lambda: model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, pad_token_id=0,
        max_new_tokens=MAX_TOKENS, min_new_tokens=MAX_TOKENS,
    )  # fmt: skip


def _learner(config: RunConfig, rows: Sequence[TrainingRow]) -> Callable[[], object]:
    model = load_model(require_model(config.model.path), config.dtype)
    batcher = pack_batcher(config)
    learner = TorchLearner(model, config, batcher=batcher)
    return lambda: learner.step(rows)


class _BareLoop:
    """Rows of equal length in two forward passes, eager attention, plain log_softmax, AdamW on float32 copies."""

    def __init__(
        self, config: RunConfig, prompts: Int32Array, completions: Int32Array, rows: Sequence[TrainingRow]
    ) -> None:
        self._model = _model(config, "eager")
        self._ids = torch.from_numpy(np.concatenate([prompts, completions], axis=1).astype(np.int64))
        self._num_prompt = prompts.shape[1]
        self._weights = torch.tensor([row.loss_weight * row.advantage for row in rows])
        self._masters = [parameter.detach().float() for parameter in self._model.parameters()]
        self._adam = torch.optim.AdamW(self._masters, lr=config.learner.peak_lr, weight_decay=0.0, fused=True)

    def __call__(self) -> None:
        for start in range(0, len(self._ids), _MICRO_ROWS):
            self._backward(self._ids[start : start + _MICRO_ROWS], self._weights[start : start + _MICRO_ROWS])
        parameters = list(self._model.parameters())
        for master, parameter in zip(self._masters, parameters, strict=True):
            master.grad = parameter.grad.float()
        torch.nn.utils.clip_grad_norm_(self._masters, 1.0)
        self._adam.step()
        with torch.no_grad():
            for master, parameter in zip(self._masters, parameters, strict=True):
                parameter.copy_(master)
                parameter.grad = None

    def _backward(self, ids_BT: Tensor, weights_B: Tensor) -> None:
        hidden = self._model.model(ids_BT[:, :-1]).last_hidden_state[:, self._num_prompt - 1 :]
        logprobs = torch.log_softmax(self._model.lm_head(hidden).float(), -1)
        chosen_BC = logprobs.gather(-1, ids_BT[:, self._num_prompt :, None])[..., 0]
        (-(weights_B[:, None] * chosen_BC).sum()).backward()  # type: ignore[no-untyped-call]


def _model(config: RunConfig, attention: str) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(
        require_model(config.model.path),
        dtype=getattr(torch, config.dtype),
        attn_implementation=attention,
        local_files_only=True,
    )
    return model.eval()


if __name__ == "__main__":
    sys.exit(main())
