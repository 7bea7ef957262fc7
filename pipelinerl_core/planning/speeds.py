"""Times of decode and optimizer steps: lines through measurements, or a roofline of a known accelerator."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pipelinerl_core.config import RunConfig
from pipelinerl_core.config.known_models import ModelShape, model_config_of, shape_of
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.supervision.cards import CARDS, known_card
from pipelinerl_core.supervision.fit import Fit, card_of, fit_of

EFFICIENCY: Mapping[str, float] = MappingProxyType({"bandwidth": 0.6, "decode": 0.5, "training": 0.4})
"""Assumed shares of the peak: of the memory bandwidth while decoding, of the FLOPs while decoding and of the FLOPs while training."""
_LINK_BYTES = 20e9
"""Assumed bytes per second at which a version reaches an engine."""
_SWAP_BYTES = 100e9
"""Assumed bytes per second at which an engine copies a version that it has received."""


@dataclass(frozen=True, slots=True)
class Line:
    """A time that grows with its load: fixed + each * load seconds."""

    fixed: float
    each: float
    lowest: float
    highest: float
    """Loads that were observed; a time beyond them is extrapolated."""

    def at(self, load: float) -> float:
        """Seconds at a load."""
        return self.fixed + self.each * load

    def times(self, factor: float) -> "Line":
        """A line with `factor` times the seconds."""
        return Line(self.fixed * factor, self.each * factor, self.lowest, self.highest)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSpeeds:
    """`Speeds` of a recorded run."""

    decode: Line
    """Time of a decode step by the running sequences of one actor."""
    train: Line
    """Time of an optimizer step by its tokens, prompts included."""

    def decode_seconds(self, num_running: int) -> float:
        """See `Speeds`."""
        return self.decode.at(num_running) if num_running else 0.0

    def train_seconds(self, num_tokens: int) -> float:
        """See `Speeds`."""
        return self.train.at(num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """`Speeds` of accelerators of the table.

    A decode step reads the weights and the KV cache of its sequences, or computes 2 FLOPs per weight and sequence,
    whichever takes longer. A trained token takes 6 FLOPs per weight; 4 with LoRA, and 2 more with activation
    checkpointing. FLOPs of attention are left out.
    """

    name: str
    weight_bytes: float
    """Of the model, on one GPU of an actor."""
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
        """See `Speeds`."""
        if not num_running:
            return 0.0
        each = num_running / self.copies
        memory = (self.weight_bytes + each * self.cache_bytes) / self.bandwidth
        return max(memory, each * self.sequence_seconds) * self.slowdown

    def train_seconds(self, num_tokens: int) -> float:
        """See `Speeds`."""
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
    fit: Fit


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
    active = active_parameters(shape)
    decode_flops = card.teraflops * 1e12 * EFFICIENCY["decode"] * engine.tensor_parallel
    weights = width * shape.num_parameters
    flops = (4 if config.learner.lora_rank else 6) + 2 * config.checkpoints_activations("cuda")
    actor = next(role for role in fit.roles if role.role == "actor")
    sequence = next(part.num_bytes for part in actor.gpu if part.name == "one sequence")
    token_bytes = sequence / (config.rollouts.max_prompt_tokens + config.rollouts.max_tokens)
    room = actor.limit_bytes - (actor.gpu_bytes - sequence)
    shares = config.placement.share_gpu and not config.takes_turns
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
        publish_seconds=weights / _LINK_BYTES,
        swap_seconds=weights / engine.tensor_parallel / _SWAP_BYTES,
        cache_tokens=max(0.0, room) / token_bytes * engine.data_parallel,
        fit=fit,
    )


def active_parameters(shape: ModelShape) -> int:
    """Weights that a token is multiplied with: all but the embedding. Of experts, which the table does not count, all."""
    return shape.num_parameters - (0 if shape.is_tied else shape.vocabulary * shape.hidden)
