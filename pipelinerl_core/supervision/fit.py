"""Memory that a run needs: of each GPU, of the host and of its shared memory, per role (docs/gpus.md).

Weights, gradients and optimizer are exact, from the model's shape and the configuration. Activations are an estimate.
`python -m benchmarks memory` compares the memory of trainer and actor on a CPU with measured memory.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipelinerl_core.batching.pack import MOST_OVER_LONGEST
from pipelinerl_core.config import RunConfig
from pipelinerl_core.config.gpu_counts import gpus_of
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.paths import model_config_of
from pipelinerl_core.models.shapes import ModelShape, shape_of
from pipelinerl_core.supervision.cards import CARDS, known_card
from pipelinerl_core.supervision.gpus import inventory

_GIB = 2.0**30
_OVERHEAD_BYTES = 1.5 * _GIB
"""CUDA context, kernels and communication buffers of a process."""
_ENGINE_BYTES = 2.0 * _GIB
"""vLLM's activations, CUDA graphs and sampler."""
_EXACT = ("weights", "reference", "teacher", "gradients", "optimizer")
"""Parts that refuse a run; the others are estimates, which no GPU has confirmed: they warn."""
_HEAD_LOGITS = 1 << 22
"""Logits of one chunk (algo/logprobs.py), of which three float32 copies exist at once."""
_BROADCAST_BYTES = 2.0 * _GIB
"""Two buffers of vLLM's packed broadcast, on rank 0 and in every worker, beside the engine's share of the memory."""
_STAGED_MODELS = 2
_ENGINE_SHARED_BYTES = 2.0 * _GIB
"""Shared memory of vLLM's workers and NCCL."""
_SHARED_VERSIONS = 6
"""Files in shared memory: two published versions, the next, a spare one, those of a slow engine and the evaluator."""
_OWN_VERSIONS = 4
"""Without shared memory: two published versions, the next one, and one that waits for its commit."""
_DELTA_VERSIONS = 2
"""The version that others are differences from, and a difference while it is made."""
_FILE_BYTES = 0.25 * _GIB
"""A file of a checkpoint in writing."""
_RESCORED_VERSIONS = 2
"""trainer.rescore_bytes=0."""
_HOST_BYTES = 2.0 * _GIB
"""Host memory of a process that uses a GPU."""
_CPU_PROCESS_BYTES = 0.5 * _GIB
"""A process on a CPU: the interpreter with torch and transformers."""
_SAMPLED_BYTES = 16
"""Per logit of a step of the embedded engine: four values in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleFit:
    """GPUs and memory that the processes of one role need."""

    role: str
    count: int
    """Processes of this kind: ranks, or actors."""
    gpus: int
    """GPUs of each."""
    gpu: Mapping[str, float]
    """Part -> bytes per GPU."""
    limit_bytes: float
    """Share of the GPU's memory that the role may use; 0: unknown."""
    host: Mapping[str, float]
    """Part -> bytes of the host, of all ranks or of each actor, without shared_bytes."""
    shared_bytes: float
    note: str = ""

    @property
    def gpu_bytes(self) -> float:
        """Bytes per GPU."""
        return sum(self.gpu.values())

    @property
    def host_bytes(self) -> float:
        """Bytes of the host."""
        return sum(self.host.values())

    @property
    def exceeds(self) -> bool:
        """Whether the need certainly exceeds the limit: the exact parts alone do."""
        return 0 < self.limit_bytes < sum(self.gpu.get(name, 0.0) for name in _EXACT)

    @property
    def is_tight(self) -> bool:
        """Whether the need probably exceeds the limit."""
        return 0 < self.limit_bytes < self.gpu_bytes and not self.exceeds

    @property
    def arithmetic(self) -> str:
        """The sum per GPU, or of the host without GPUs. Example: weights 15.2 GB + KV cache 4.3 GB = 19.5 GB."""
        parts, total = (self.gpu, self.gpu_bytes) if self.gpus else (self.host, self.host_bytes)
        terms = " + ".join(f"{name} {_gb(num_bytes)}" for name, num_bytes in parts.items() if num_bytes)
        return f"{terms} = {_gb(total)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """GPUs and memory that a run needs."""

    model: str
    num_parameters: int
    card: str
    card_bytes: float
    """0: unknown."""
    roles: tuple[RoleFit, ...]

    def lines(self) -> list[str]:
        card = f"{self.card}, {_gb(self.card_bytes)}" if self.card_bytes else "unknown: set placement.gpu"
        number, unit = (1e9, "B") if self.num_parameters >= 1e9 else (1e6, "M")
        lines = [f"{self.model}: {self.num_parameters / number:.2f} {unit} parameters; GPU {card}"]
        for role in self.roles:
            mark = "!!" if role.exceeds else " ?" if role.is_tight else "ok" if role.limit_bytes else "--"
            of = f" of {_gb(role.limit_bytes)}" if role.limit_bytes else ""
            gpu = f"GPU {_gb(role.gpu_bytes)}{of}  " if role.gpus else "no GPU  "
            where = f"{role.count} x {role.gpus} GPU{'s' * (role.gpus != 1)}" if role.gpus else f"{role.count} x"
            lines.append(
                f"{mark}  {role.role:<9} {where:<11} {gpu}host {_gb(role.host_bytes)}  "
                f"/dev/shm {_gb(role.shared_bytes)}"
            )
            lines.append(f"      {role.arithmetic}")
            lines += [f"      {role.note}"] if role.note else []
        return lines

    def document(self) -> dict[str, Any]:
        """The fit for machines; sizes in bytes."""
        sums = ("gpu_bytes", "host_bytes", "exceeds")
        roles = [
            asdict(role)
            | {"gpu": _rows(role.gpu), "host": _rows(role.host)}
            | {name: getattr(role, name) for name in sums}
            for role in self.roles
        ]
        return asdict(self) | {"roles": roles}


def _rows(parts: Mapping[str, float]) -> list[dict[str, Any]]:
    return [{"name": name, "num_bytes": num_bytes} for name, num_bytes in parts.items()]


def card_of(config: RunConfig) -> tuple[str, float]:
    """Name and bytes of the GPUs of a run: placement.gpu, else the GPUs of this host; ("", 0) if unknown.

    Raises ConfigError for a name that CARDS lacks.
    """
    name = config.placement.gpu
    if not name:
        gpus = inventory() if config.placement.kind == "local" else ()
        return (gpus[0].name, float(min(gpu.num_bytes for gpu in gpus))) if gpus else ("", 0.0)
    if re.fullmatch(r"\d+(\.\d+)?", name):
        return f"{name} GB", float(name) * 1e9
    key = known_card(name)
    if key is None:
        raise ConfigError(f"placement.gpu={name}: unknown. Set its memory in GB, or one of {', '.join(CARDS)}")
    return key, CARDS[key].gib * _GIB


def fit_of(config: RunConfig) -> Fit | None:
    """The fit of a run; None if the shape of the model is unknown (not downloaded, and not a well-known model).

    Raises ConfigError as `card_of`.
    """
    entries = model_config_of(config.model.path)
    shape = None if entries is None else shape_of(entries)
    if shape is None:
        return None
    card, card_bytes = card_of(config)
    roles = (_trainer(config, shape, card_bytes), _actor(config, shape, card_bytes))
    return Fit(
        model=config.model.path, num_parameters=shape.num_parameters, card=card, card_bytes=card_bytes, roles=roles
    )


def trained_parameters(config: RunConfig) -> float | None:
    """Parameters that the optimizer changes; None if the shape of the model is unknown."""
    entries = model_config_of(config.model.path)
    shape = None if entries is None else shape_of(entries)
    return None if shape is None else _trained(config, shape)


def check_fit(config: RunConfig) -> list[str]:
    """Refuse a run that cannot fit its GPUs. Returns warnings: a role that probably does not fit, and what to set.

    Raises ConfigError with the sum and what to set.
    """
    fit = fit_of(config)
    if fit is None:
        return []
    for role in fit.roles:
        if role.exceeds:
            raise ConfigError(
                f"{role.role}: {role.arithmetic} per GPU, but it may use {_gb(role.limit_bytes)} of {fit.card}. "
                f"{_remedy(config, role, fit)}"
            )
    return [
        f"{role.role}: about {_gb(role.gpu_bytes)} of {_gb(role.limit_bytes)} on each GPU: it may run out of memory. "
        f"{_remedy(config, role, fit)}"
        for role in fit.roles
        if role.is_tight
    ]


def container_bytes(config: RunConfig, role: str) -> tuple[float, float] | None:
    """Bytes of memory, without /dev/shm, and of /dev/shm that a container of the role `actor` or `trainer` needs.

    None if the model is unknown. Of a trainer on several hosts: of the host of rank 0, which needs the most.
    """
    fit = fit_of(config)
    if fit is None:
        return None
    role_fit = next(each for each in fit.roles if each.role == role)
    nodes = config.placement.trainer_nodes if role == "trainer" else 1
    whole = ("versions",) if config.learner.zero_stage else ("versions", "checkpoint")  # of rank 0 alone
    own = sum(size / (1 if name in whole else nodes) for name, size in role_fit.host.items())
    return own, role_fit.shared_bytes


def _trainer(config: RunConfig, shape: ModelShape, card_bytes: float) -> RoleFit:
    gpus = min(1, gpus_of(config, "trainer"))
    state, offloaded = _state(config, shape)
    state["activations"] = _activation_bytes(config, shape, "cuda" if gpus else "cpu")
    num_published = shape.num_parameters if config.weights.content == "merged" else _trained(config, shape)
    version = _width(config) * num_published
    if config.gpu_turns:
        limit = max(0.0, card_bytes - _resting_engine(config, shape))
        offloaded += state["optimizer"] if gpus else 0.0
    else:
        limit = card_bytes - (config.engine_memory_share * card_bytes if config.placement.share_gpu else 0.0)
    return RoleFit(
        role="trainer",
        count=config.trainer.ranks,
        gpus=gpus,
        gpu={**state, "CUDA": _OVERHEAD_BYTES, "broadcast": _broadcast_bytes(config)},
        limit_bytes=limit if gpus else 0.0,
        host=_trainer_host(config, shape, version, {"offloaded": offloaded} | ({} if gpus else state)),
        shared_bytes=shared_bytes(config, version) if config.weights.uses_shared_memory else _ENGINE_SHARED_BYTES,
    )


def _trainer_host(config: RunConfig, shape: ModelShape, version: float, state: dict[str, float]) -> dict[str, float]:
    """Of all ranks; `state`: what each of them has in the memory of the host."""
    trained, gpus, shm = _trained(config, shape), gpus_of(config, "trainer"), config.weights.uses_shared_memory
    # Rank 0 has snapshots of the weights, in shared memory or its own. While a checkpoint is written, there is a copy
    # of what was not written when the next step updates the weights: on rank 0, or of the part of each rank.
    own = 0 if shm else (_OWN_VERSIONS + _DELTA_VERSIONS * config.uses_deltas) * version
    rescored = 0 if shm and not config.learner.lora_rank else _rescored(config, shape)  # 0: these are published files
    writers = config.trainer.ranks if config.learner.zero_stage else 1
    checkpoint = 12.0 * trained + writers * _FILE_BYTES
    if not gpus:
        # On a CPU a step takes longer than the writing of all files, each of which has at least one tensor.
        largest = 4 * shape.vocabulary * shape.hidden / writers
        checkpoint = min(12.0 * trained, writers * max(_FILE_BYTES, largest))
    if not gpus and not config.learner.splits_state:
        more = config.trainer_threads - 1  # packs computed at once, beside the first
        state = state | {"packs": more * (state["activations"] + _width(config) * trained)}
    return {name: size * config.trainer.ranks for name, size in state.items()} | {
        "versions": own + rescored,
        "checkpoint": checkpoint,
        "processes": (_HOST_BYTES if gpus else _CPU_PROCESS_BYTES) * config.trainer.ranks,
    }


def shared_bytes(config: RunConfig, version_bytes: float) -> float:
    """Of the published versions in shared memory, with those that the trainer keeps to score rollouts again."""
    rules = config.trainer
    kept = 0.0
    if rules.rescore_share and config.learner.plans_packs and not config.learner.lora_rank:
        kept = rules.rescore_bytes or _RESCORED_VERSIONS * version_bytes
    return _SHARED_VERSIONS * version_bytes + kept


def _rescored(config: RunConfig, shape: ModelShape) -> float:
    """Versions that rank 0 keeps to score rollouts again: the newest, and earlier ones within their budget."""
    rules, version = config.trainer, _width(config) * _trained(config, shape)
    if not rules.rescore_share or not config.learner.plans_packs:
        return 0.0
    return version + (rules.rescore_bytes or _RESCORED_VERSIONS * version)


def _state(config: RunConfig, shape: ModelShape) -> tuple[dict[str, float], float]:
    """Weights, gradients and optimizer of a rank, and what is kept in host memory instead."""
    width, trained, learner = _width(config), _trained(config, shape), config.learner
    ranks = config.trainer.ranks if learner.splits_state else 1
    by_stage = [ranks if learner.zero_stage >= stage else 1 for stage in (3, 2, 1)]
    weights = width * shape.num_parameters / by_stage[0]
    is_shared = learner.lora_rank and not config.loss.ref_model and learner.zero_stage < 3
    reference = width * shape.num_parameters if config.loss.kl_coefficient and not is_shared else 0.0
    teacher = width * _teacher_shape(config, shape).num_parameters if config.loss.teacher else 0.0
    # torch: gradients of a pack and their float32 sum; DeepSpeed: one sum.
    gradients = (4 if learner.splits_state else 4 + width) * trained / by_stage[1]
    masters = 4 if width < 4 or learner.splits_state else 0
    optimizer = (8 + masters) * trained / by_stage[2]
    offloaded = 0.0
    if learner.offload != "none":
        offloaded, optimizer = optimizer, 0.0
    if learner.offload == "parameters":
        offloaded, weights = offloaded + weights, 0.0
    parts = {"weights": weights, "reference": reference, "teacher": teacher, "gradients": gradients,
             "optimizer": optimizer}  # fmt: skip
    return parts, offloaded


def _teacher_shape(config: RunConfig, shape: ModelShape) -> ModelShape:
    """The shape of loss.teacher; the shape of the trained model if the teacher's config.json cannot be read."""
    entries = model_config_of(config.loss.teacher)
    return (shape_of(entries) if entries is not None else None) or shape


def _trained(config: RunConfig, shape: ModelShape) -> float:
    """Parameters that the optimizer changes: all, or the adapters of the decoder's linear layers."""
    rank = config.learner.lora_rank
    if not rank:
        return shape.num_parameters
    queries, keys = shape.heads * shape.head_dim, shape.groups * shape.head_dim
    sides = {
        "q_proj": shape.hidden + queries, "k_proj": shape.hidden + keys, "v_proj": shape.hidden + keys,
        "o_proj": queries + shape.hidden, "gate_proj": shape.hidden + shape.inner,
        "up_proj": shape.hidden + shape.inner, "down_proj": shape.inner + shape.hidden,
    }  # fmt: skip
    chosen = config.learner.lora_targets or tuple(sides)
    return rank * shape.layers * sum(sides.get(name, 0) for name in chosen)


def _activation_bytes(config: RunConfig, shape: ModelShape, device: str) -> float:
    """Of one pack: per token and layer the inputs of norms, projections and feed-forward, kept for the backward pass.

    About 24 * hidden + 8 * inner bytes in bfloat16 (norms keep float32); with checkpointing the input of each layer,
    and one whole layer.
    """
    longest = config.rollouts.max_prompt_tokens + config.rollouts.max_tokens
    num_tokens = max(config.trainer.pack_tokens, (MOST_OVER_LONGEST if config.trainer.share_prompts else 1) * longest)
    layer = (24 * shape.hidden + 8 * shape.inner) * _width(config) / 2
    kept = _width(config) * shape.hidden * shape.layers + layer
    per_token = kept if config.checkpoints_activations(device) else layer * shape.layers
    return num_tokens * per_token + 3 * 4 * _HEAD_LOGITS


def _actor(config: RunConfig, shape: ModelShape, card_bytes: float) -> RoleFit:
    engine, width = config.engine, _width(config)
    shards, gpus = engine.tensor_parallel, gpus_of(config, "actor")
    weights = width * shape.num_parameters
    longest = config.rollouts.max_prompt_tokens + config.longest_completion
    sequence = shape.cache_bytes * width / 2 * longest / min(shards, shape.groups)
    beside = _resting_trainer(config, shape) if config.gpu_turns else _broadcast_bytes(config)
    share = 1.0 if config.gpu_turns and not engine.has_workers else config.engine_memory_share
    limit = min(share * card_bytes, max(0.0, card_bytes - beside)) if gpus else 0.0
    note, room = "", limit - weights / shards - _ENGINE_BYTES
    if limit and room > 0 and engine.has_workers:
        whole = int(room // sequence)
        note = f"{whole} sequences of {longest} tokens fit the KV cache; engine.concurrency={engine.concurrency}" + (
            f" per copy, {engine.data_parallel} copies" if engine.data_parallel > 1 else ""
        )
    staged = _STAGED_MODELS * weights if engine.has_workers else 0.0
    return RoleFit(
        role="actor",
        count=config.placement.actors,
        gpus=gpus,
        gpu=_actor_gpu(config, shape, weights / shards, sequence),
        limit_bytes=limit,
        host=_actor_host(config, shape, weights, sequence),
        shared_bytes=staged + _ENGINE_SHARED_BYTES,
        note=note,
    )


def _actor_gpu(config: RunConfig, shape: ModelShape, weights: float, sequence: float) -> dict[str, float]:
    """vLLM fits its KV cache to the card; the embedded engine allocates all slots, and a swap has a second copy."""
    engine = config.engine
    if engine.has_workers:
        return {"weights": weights, "one sequence": sequence, "engine": _ENGINE_BYTES}
    sampling = _SAMPLED_BYTES * engine.concurrency * shape.vocabulary
    return {"weights": weights, "staged version": weights, "KV cache": engine.concurrency * sequence,
            "sampling": sampling, "engine": _ENGINE_BYTES}  # fmt: skip


def _actor_host(config: RunConfig, shape: ModelShape, weights: float, sequence: float) -> dict[str, float]:
    engine, gpus = config.engine, gpus_of(config, "actor")
    base = weights if config.uses_deltas else 0.0  # to which differences are applied
    if gpus:
        copies = 3 if config.gpu_turns and engine.has_workers else 2  # a sleeping vLLM has its weights there
        return {"weights": copies * weights, "base": base, "processes": _HOST_BYTES * gpus}
    cache = engine.concurrency * sequence
    if engine.has_workers:
        return {"weights": 3 * weights, "base": base, "KV cache": cache, "processes": _HOST_BYTES}
    is_mapped = config.weights.uses_shared_memory and config.weights.content == "merged"
    return {
        "weights": weights if is_mapped else 3 * weights,  # else the next version, too, as bytes and tensors
        "base": base,
        "head": 2 * 4 * shape.vocabulary * shape.hidden if _width(config) < 4 else 0,  # in float32, also the next
        "KV cache": cache,
        "sampling": _SAMPLED_BYTES * engine.concurrency * shape.vocabulary,
        "processes": _CPU_PROCESS_BYTES,
    }


def _resting_trainer(config: RunConfig, shape: ModelShape) -> float:
    """What the trainer keeps on the GPU while the engine has the turn: all but gradients, optimizer, activations."""
    state, _ = _state(config, shape)
    return _OVERHEAD_BYTES + sum(size for name, size in state.items() if name not in ("gradients", "optimizer"))


def _resting_engine(config: RunConfig, shape: ModelShape) -> float:
    """What the engine keeps on the GPU while the trainer has the turn; vLLM's weights are in host memory."""
    return _ENGINE_BYTES + (0.0 if config.engine.has_workers else _width(config) * shape.num_parameters)


def _broadcast_bytes(config: RunConfig) -> float:
    return _BROADCAST_BYTES if config.weights.is_broadcast else 0.0


def _width(config: RunConfig) -> int:
    return 4 if config.model.dtype == "float32" else 2


def _remedy(config: RunConfig, role: RoleFit, fit: Fit) -> str:
    if role.role == "actor":
        return "Raise engine.tensor_parallel or engine.memory_share, or lower rollouts.max_tokens"
    learner, options = config.learner, []
    activations = role.gpu["activations"]
    state = role.gpu_bytes - activations
    if state <= role.limit_bytes and not config.checkpoints_activations("cuda"):
        options.append("set learner.activation_checkpointing=true")
    if state <= role.limit_bytes:
        options.append(f"lower trainer.pack_tokens ({config.trainer.pack_tokens}) or rollouts.max_tokens")
    if state > role.limit_bytes and not learner.lora_rank:
        shards = math.ceil(18 * fit.num_parameters / max(1.0, role.limit_bytes - activations - 2 * _OVERHEAD_BYTES))
        if not learner.splits_state or learner.zero_stage < 3 or config.trainer.ranks < shards:
            ranks = max(2, shards, config.trainer.ranks)
            options.append(f"set learner.kind=deepspeed learner.zero_stage=3 trainer.ranks={ranks}")
        options.append("set learner.lora_rank=16")
    if config.placement.share_gpu is True:
        options += ["lower engine.memory_share", "set placement.share_gpu=turns"]
    text = ", or ".join(options) or "use GPUs with more memory"
    return f"{text[0].upper()}{text[1:]}"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
