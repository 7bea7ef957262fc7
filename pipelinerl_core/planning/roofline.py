"""Inputs of a prediction without a measurement: a roofline of known accelerators, and assumed lengths."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pipelinerl_core.config import RunConfig
from pipelinerl_core.emulation.accelerators import EmulatedSpeeds
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.paths import model_config_of
from pipelinerl_core.models.shapes import ModelShape, shape_of
from pipelinerl_core.planning.lengths import Lengths
from pipelinerl_core.planning.prediction import INPUTS, SYNC_SECONDS
from pipelinerl_core.planning.simulated_engine import Speeds
from pipelinerl_core.planning.simulator import Work
from pipelinerl_core.supervision.cards import CARDS, known_card
from pipelinerl_core.supervision.fit import card_of, fit_of

EFFICIENCY: Mapping[str, float] = MappingProxyType({"bandwidth": 0.6, "decode": 0.5, "training": 0.4})
"""Assumed shares of the peak: of the memory bandwidth and the FLOPs while decoding, of the FLOPs while training."""
_LINK_BYTES = 20e9
"""Assumed bytes per second at which a version reaches an engine."""
_SWAP_BYTES = 100e9
"""Assumed bytes per second at which an engine copies a version that it has received."""
_HOST_BYTES = 25e9
"""Assumed bytes per second between a GPU and pinned memory of the host (PCIe 4.0 x16), in each direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """`Speeds` of accelerators of the table.

    A decode step reads the weights and the KV cache of its sequences, or computes 2 FLOPs per weight and sequence,
    whichever takes longer. A trained token takes 6 FLOPs per weight; 4 with LoRA, and 2 more with activation
    checkpointing. FLOPs of attention are left out.
    """

    name: str
    weight_bytes: float
    """Bytes of the model's weights on one GPU of an actor."""
    cache_bytes: float
    """Keys and values of one sequence of mean length, on one GPU."""
    bandwidth: float
    """Bytes per second of one GPU, with the efficiency."""
    sequence_seconds: float
    """Time of the FLOPs of one token of one sequence on the GPUs of an actor."""
    copies: int
    """Copies of the model in an actor (engine.data_parallel)."""
    token_seconds: float
    """Time of the FLOPs of one trained token on all ranks."""
    slowdown: float = 1.0
    """2 if engine and trainer share a GPU at the same time."""

    def decode_seconds(self, num_running: int) -> float:
        if not num_running:
            return 0.0
        each = num_running / self.copies
        memory = (self.weight_bytes + each * self.cache_bytes) / self.bandwidth
        return max(memory, each * self.sequence_seconds) * self.slowdown

    def train_seconds(self, num_tokens: int) -> float:
        return num_tokens * self.token_seconds * self.slowdown


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerators:
    """A configuration on accelerators of the table."""

    speeds: Roofline
    prefill_token_seconds: float
    publish_seconds: float
    swap_seconds: float
    cache_tokens: float
    """Tokens in the KV cache of an actor."""
    turn_seconds: float


def roofline(config: RunConfig, tokens: float) -> Accelerators:
    """Speeds from the table of accelerators. tokens: mean tokens of a sequence in the KV cache.

    Raises ConfigError for an unknown accelerator or model.
    """
    entries = model_config_of(config.model.path)
    shape = None if entries is None else shape_of(entries)
    name, _ = card_of(config)
    known = known_card(name)
    if shape is None or known is None or config.model.device == "cpu":
        missing = "of an unknown accelerator (set placement.gpu, for example H100)"
        if shape is None:
            missing = f"of model.path={config.model.path}, whose shape is unknown (download it, or set a known model)"
        raise ConfigError(
            f"no calibration of these settings on this machine, and no speeds {missing}. Measure them: "
            "`pipelinerl simulate ... --calibrate`"
        )
    card, engine, fit = CARDS[known], config.engine, fit_of(config)
    assert fit is not None
    width = 4 if config.model.dtype == "float32" else 2
    active = _active_parameters(shape)
    decode_flops = card.teraflops * 1e12 * EFFICIENCY["decode"] * engine.tensor_parallel
    weights = width * shape.num_parameters
    version = weights if config.weights.content == "merged" else 0.0
    flops = (4 if config.learner.lora_rank else 6) + 2 * config.checkpoints_activations("cuda")
    actor = next(role for role in fit.roles if role.role == "actor")
    cache = actor.gpu["one sequence" if engine.has_workers else "KV cache"]
    slots = 1 if engine.has_workers else engine.concurrency
    token_bytes = cache / (slots * (config.rollouts.max_prompt_tokens + config.longest_completion))
    room = actor.limit_bytes - (actor.gpu_bytes - cache)
    shares = config.placement.share_gpu is True and not config.takes_turns
    optimizer = next(role.gpu["optimizer"] for role in fit.roles if "optimizer" in role.gpu)
    speeds = Roofline(
        name=known,
        weight_bytes=weights / engine.tensor_parallel,
        cache_bytes=token_bytes * tokens,
        bandwidth=card.terabytes * 1e12 * EFFICIENCY["bandwidth"],
        sequence_seconds=2 * active / decode_flops,
        copies=engine.data_parallel,
        token_seconds=flops * active / (card.teraflops * 1e12 * EFFICIENCY["training"] * config.trainer.ranks),
        slowdown=2.0 if shares else 1.0,
    )
    return Accelerators(
        speeds=speeds,
        prefill_token_seconds=2 * active / (decode_flops * engine.data_parallel),
        publish_seconds=version / _LINK_BYTES,
        swap_seconds=weights / engine.tensor_parallel / _SWAP_BYTES,
        cache_tokens=max(0.0, room) / token_bytes * engine.data_parallel,
        turn_seconds=2 * (optimizer + weights * engine.has_workers) / _HOST_BYTES if config.gpu_turns else 0.0,
    )


class Table:
    """A source of inputs without a measurement: the table of accelerators, and assumed lengths."""

    def __init__(self, lengths: Lengths | None = None) -> None:
        """lengths: of completions; None: uniform from 1 to rollouts.max_tokens."""
        self._lengths = lengths

    def speeds_of(self, config: RunConfig) -> Speeds:
        if config.emulation.accelerators:
            return EmulatedSpeeds.of(config)
        return self._accelerators(config).speeds

    def work_of(self, config: RunConfig) -> Work:
        lengths = self._lengths_of(config)
        if config.emulation.accelerators:
            return Work(lengths=lengths, prompt_tokens=self._prompt_tokens(config), sync_seconds=SYNC_SECONDS)
        accelerators = self._accelerators(config)
        return Work(
            lengths=lengths,
            prompt_tokens=self._prompt_tokens(config),
            prefill_token_seconds=accelerators.prefill_token_seconds,
            swap_seconds=accelerators.swap_seconds,
            publish_seconds=accelerators.publish_seconds,
            sync_seconds=SYNC_SECONDS,
            cache_tokens=accelerators.cache_tokens,
            turn_seconds=accelerators.turn_seconds,
        )

    def sources_of(self, config: RunConfig) -> dict[str, str]:
        if config.emulation.accelerators:
            sources = dict.fromkeys(INPUTS, "assumed: 0")
            sources |= dict.fromkeys(("decode", "train"), "configured: emulation.*")
        else:
            name = self._accelerators(config).speeds.name
            card = CARDS[name]
            flops, bandwidth = f"{card.teraflops:g} TFLOPS", f"{card.terabytes:g} TB/s"
            sources = {
                "decode": f"looked up: {name}, {EFFICIENCY['bandwidth']:.0%} of {bandwidth}, "
                f"{EFFICIENCY['decode']:.0%} of {flops}",
                "train": f"looked up: {name}, {EFFICIENCY['training']:.0%} of {flops} on each rank",
                "weights": f"assumed: {_LINK_BYTES / 1e9:g} GB/s to the engines, {_SWAP_BYTES / 1e9:g} GB/s to swap",
                "trainer": "assumed: 0",
            }
        sources["messages"] = "assumed: syncs of the hub"
        sources["completions"] = "given" if self._lengths else "assumed: uniform up to rollouts.max_tokens"
        sources["prompts"] = "assumed: half of rollouts.max_prompt_tokens"
        return sources

    def warnings_of(self, config: RunConfig) -> list[str]:
        return ["FLOPs of attention, scoring, and evaluations"]

    def _lengths_of(self, config: RunConfig) -> Lengths:
        longest = config.rollouts.max_tokens
        return self._lengths.scaled(1.0, longest) if self._lengths else Lengths.uniform(longest)

    def _prompt_tokens(self, config: RunConfig) -> int:
        return config.rollouts.max_prompt_tokens // 2

    def _accelerators(self, config: RunConfig) -> Accelerators:
        return roofline(config, self._prompt_tokens(config) + self._lengths_of(config).mean / 2)


def _active_parameters(shape: ModelShape) -> int:
    """Weights that a token is multiplied with: all but the embedding. Of experts all, an upper bound."""
    return shape.num_parameters - (0 if shape.is_tied else shape.vocabulary * shape.hidden)
