"""The sections of a configuration together, and what follows from several of them."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field

from pipelinerl_core.config.engines import EmbeddedConfig, EngineConfig
from pipelinerl_core.config.environments import ClassEnvironment, EnvironmentConfig
from pipelinerl_core.config.interleave import Interleave
from pipelinerl_core.config.learners import LearnerConfig, TorchConfig
from pipelinerl_core.config.losses import LossConfig, ReinforceLoss
from pipelinerl_core.config.mixture import MixturePart
from pipelinerl_core.config.prompts import PromptsConfig, PromptsSection, SumsPrompts
from pipelinerl_core.config.schedules import PipelineSchedule, ScheduleConfig
from pipelinerl_core.config.scoring import RewardConfig
from pipelinerl_core.config.section import Dtype, Section
from pipelinerl_core.config.sections import (
    CheckpointConfig,
    EmulationConfig,
    EvalConfig,
    ModelConfig,
    PlacementConfig,
    RolloutsConfig,
    StoreConfig,
    TrackingConfig,
    WeightsConfig,
)
from pipelinerl_core.config.training import TrainerConfig

MIN_EVAL_STEPS = 20
"""With eval.every_steps=0, runs of fewer steps are not evaluated during training."""
EVALS_PER_RUN = 10
_EVALUATION_SLOTS = 256
_EVALUATION_FACTOR = 4
"""Times engine.concurrency: who lowers the key for lack of memory lowers the memory of evaluations, too."""
# Estimate for Qwen2.5 in bfloat16: a token has 3 MB of activations at 1.5B and 7 MB at 7B, of an H100's 80 GB.
LONG_PACK_TOKENS = 8192


class TaskSections(Section):
    """The sections that a part of a mixture or a set of eval.sets may replace."""

    prompts: PromptsConfig = SumsPrompts()
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig = ClassEnvironment()


class Settings(Section):
    """All settings of a run, and what follows from them."""

    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of all random numbers: prompts, sampling, initial weights. Change to repeat an experiment
    independently."""
    model: ModelConfig = ModelConfig()
    prompts: PromptsConfig = SumsPrompts()
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig = ClassEnvironment()
    mixture: dict[str, MixturePart] = Field({})
    rollouts: RolloutsConfig = RolloutsConfig()
    engine: EngineConfig = EmbeddedConfig()
    schedule: ScheduleConfig = PipelineSchedule()
    trainer: TrainerConfig = TrainerConfig()
    learner: LearnerConfig = TorchConfig()
    loss: LossConfig = ReinforceLoss()
    weights: WeightsConfig = WeightsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    placement: PlacementConfig = PlacementConfig()
    tracking: TrackingConfig = TrackingConfig()
    store: StoreConfig = StoreConfig()
    emulation: EmulationConfig = EmulationConfig()

    @property
    def window_groups(self) -> int:
        """Admission window W: groups that may be outstanding at once, (max_lag + 1) * groups_per_step."""
        return (self.schedule.max_lag + 1) * self.trainer.groups_per_step

    @property
    def takes_turns(self) -> bool:
        """Whether the engines pause while the trainer steps."""
        return self.schedule.takes_turns

    @property
    def gpu_turns(self) -> bool:
        """Whether trainer and actor compute on one GPU by turns."""
        return self.placement.share_gpu == "turns"

    @property
    def engine_memory_share(self) -> float:
        """Share of a GPU's memory for the engine; with turns, the trainer keeps its weights on the GPU."""
        return self.engine.memory_share or {False: 0.9, True: 0.4, "turns": 0.75}[self.placement.share_gpu]

    @property
    def paces_engines(self) -> bool:
        """Whether engines slow down for the trainer."""
        return self.engine.pace and not (self.takes_turns or self.gpu_turns)

    @property
    def trainer_threads(self) -> int:
        """Packs that the trainer computes at once; includes the engines' threads if the engines pause meanwhile."""
        if self.trainer.threads:
            return self.trainer.threads
        hands_over = self.takes_turns and self.placement.cores == "shared"
        return self.placement.threads * (1 + self.placement.actors if hands_over else 1)

    @property
    def group_seconds(self) -> float:
        """Longest wait of the trainer for another finished group: a whole rollout at ten tokens per second, the time
        of its environment, and ten minutes."""
        sections = [part.environment for part in self.parts.values()]
        episode = max(section.episode_seconds if section.path else 0.0 for section in sections)
        return 600.0 + self.rollouts.max_tokens / 10.0 + episode

    @property
    def evaluation_seconds(self) -> float:
        """Deadline of one evaluation: half an hour, and several times the limit of the first evaluation per set."""
        group_seconds = self.for_evaluation.group_seconds
        return 1800.0 + group_seconds + 4 * self.eval.max_seconds * (len(self.parts) + len(self.eval.sets))

    @property
    def for_evaluation(self) -> Self:
        """This configuration with the sampling of an evaluation in place of the sampling of training."""
        chosen, rollouts = self.eval, self.rollouts
        update = {
            "temperature": rollouts.temperature if chosen.temperature == "auto" else chosen.temperature,
            "top_p": chosen.top_p,
            "max_tokens": chosen.max_tokens or rollouts.max_tokens,
        }
        return self.model_copy(update={"rollouts": rollouts.model_copy(update=update)})

    @property
    def evaluation_slots(self) -> int:
        """Sequences that the engine of an evaluator decodes at once: throughput counts, not latency."""
        slots = min(_EVALUATION_SLOTS, _EVALUATION_FACTOR * self.engine.concurrency)
        return min(slots, self.engine.batched_tokens or slots)

    @property
    def longest_completion(self) -> int:
        """Tokens of a completion at most in the engine of an actor, which may evaluate too."""
        return max(self.rollouts.max_tokens, self.eval.max_tokens if self.evaluates_on_actors else 0)

    @property
    def model_paths(self) -> dict[str, str]:
        """Setting -> the model that it names: model.path first, then reference model and teacher, if any."""
        paths = {"loss.ref_model": self.loss.ref_model, "loss.teacher": self.loss.teacher}
        return {"model.path": self.model.path, **{key: path for key, path in paths.items() if path}}

    @property
    def evaluates_on_actors(self) -> bool:
        """Whether the evaluations during training use the engine of an actor."""
        if self.eval.on == "auto":
            return self.engine.has_workers or self.placement.kind == "work_pools" or self.gpu_turns
        return self.eval.on == "actors"

    @property
    def eval_steps(self) -> int:
        """Optimizer steps between two evaluations during training; 0: none."""
        is_off = not self.eval.num_prompts or not self.eval.subset or self.emulation.accelerators
        if is_off or (not self.eval.every_steps and self.trainer.steps < MIN_EVAL_STEPS):
            return 0
        return self.eval.every_steps or -(-self.trainer.steps // EVALS_PER_RUN)

    @property
    def parts(self) -> Mapping[str, Self]:
        """Part -> its configuration, without a mixture; {"": this configuration} without a mixture. Raises
        ValidationError for keys that a section of a part does not have."""
        return {name: self.with_part(name) for name in self.mixture} or {"": self}

    def with_part(self, name: str) -> Self:
        """The configuration of one part of the mixture, without a mixture and without sets, which are of the run.

        Raises ValidationError.
        """
        part = self.mixture[name]
        changes = dict[str, Any](mixture={}, eval=self.eval.model_copy(update={"sets": {}}))
        if part.prompts:
            own = {"kind": self.prompts.kind, **self.prompts.model_dump(include=set(PromptsSection.model_fields))}
            changes["prompts"] = TaskSections.model_validate({"prompts": {**own, **part.prompts}}).prompts
        if part.reward:
            changes["reward"] = TaskSections.model_validate({"reward": part.reward}).reward
        if part.environment:
            changes["environment"] = TaskSections.model_validate({"environment": part.environment}).environment
        if part.max_tokens:
            changes["rollouts"] = self.rollouts.model_copy(update={"max_tokens": part.max_tokens})
        return self.model_copy(update=changes)

    def mixture_order(self) -> Interleave:
        """The part of each group of a mixture; keep the object, because it computes the order step by step."""
        return Interleave({name: part.weight for name, part in self.mixture.items()})

    def with_set(self, name: str) -> Self:
        """This configuration with the prompts of a set of eval.sets; of another kind of prompts only
        the keys that every kind has are kept. Raises ValidationError for keys that these prompts do not have."""
        changes, own = self.eval.sets[name], self.prompts.model_dump()
        kind = changes.get("kind", own["kind"])
        if kind != own["kind"]:
            own = {name: own[name] for name in PromptsSection.model_fields}
        prompts = TaskSections.model_validate({"prompts": {**own, **changes}}).prompts
        if held_out := prompts.held_out_in(changes):  # another file or split is held out as a whole
            prompts = TaskSections.model_validate({"prompts": {**own, **held_out, **changes}}).prompts
        sets = {"eval": self.eval.model_copy(update={"sets": {}})}
        return self.model_copy(update={"prompts": prompts, "mixture": {}, **sets})

    @property
    def trains_equal_rewards(self) -> bool:
        """Whether rollouts of equal rewards may have a gradient: by another term of the loss, or by advantages that
        depend on more than the rewards of their rollouts."""
        loss = self.loss
        own = loss.has_own_advantages or loss.decouples_components or loss.credits_turns
        return bool(self.other_term) or own or any(part.reward.overlong_tokens for part in self.parts.values())

    @property
    def other_term(self) -> str:
        """The setting of a term of the loss that is no multiple of the advantage: such a term has a gradient also in
        rollouts of equal rewards. Empty without such a term."""
        loss = self.loss
        if not getattr(loss, "skips_zero_advantage", True):
            return "loss.skips_zero_advantage=false"
        if loss.has_value_head:
            return "loss.advantage=value"
        if loss.teacher:
            return f"loss.teacher={loss.teacher}"
        if loss.kl_coefficient:
            return f"loss.kl_coefficient={loss.kl_coefficient:g}"
        return f"loss.entropy_bonus={loss.entropy_bonus:g}" if loss.entropy_bonus else ""

    @property
    def skips_backward(self) -> bool:
        """Whether rollouts whose advantage is 0 have no backward pass."""
        return self.trainer.skip_zero_advantage and self.learner.plans_packs and not self.other_term

    @property
    def skips_forward(self) -> bool:
        """Whether they are not computed at all. learner.ess_scaling needs the ratios of all rollouts."""
        return self.skips_backward and not self.trainer.score_zero_advantage and not self.learner.ess_scaling

    @property
    def stays_on_cpu(self) -> bool:
        """Whether learner and embedded engine compute on the CPU even where there is a GPU."""
        return self.model.device == "cpu" or (self.model.device == "auto" and not self.engine.has_workers)

    def checkpoints_activations(self, device_type: str) -> bool:
        """Whether the learner on a device ("cpu", "cuda") recomputes activations instead of storing them."""
        chosen = self.learner.activation_checkpointing
        if chosen != "auto":
            return chosen
        longest = self.rollouts.max_prompt_tokens + self.rollouts.max_tokens
        return device_type == "cuda" and max(self.trainer.pack_tokens, longest) >= LONG_PACK_TOKENS

    @property
    def dtype(self) -> Dtype:
        """model.dtype; `build_config` has replaced auto."""
        assert self.model.dtype != "auto"
        return self.model.dtype

    @property
    def arithmetic(self) -> dict[str, str | int]:
        """Settings on which the trainer's rounding depends: with equal settings, one machine repeats steps bit by
        bit."""
        learner, trainer = self.learner, self.trainer
        is_auto = learner.attention == "auto" and self.stays_on_cpu and self.model.dtype == "float32"
        is_padded = learner.attention == "padded" or is_auto
        # Stored runs from before learner.attention were padded and have no such entry; the comparison must hold.
        attention = {} if is_padded else {"attention": learner.attention}
        return {
            "kind": learner.kind,
            "zero_stage": learner.zero_stage,
            "offload": learner.offload,
            "ranks": trainer.ranks,
            "pack_tokens": trainer.pack_tokens,
            "packing": trainer.packing,
            "device": self.model.device,
            **attention,
            **({"share_prompts": "true"} if trainer.share_prompts else {}),
        }

    def phase_end(self, step: int) -> int:
        """Last step of the phase of `step` (1, 2, ...); a phase publishes only the version of its last step."""
        every = self.schedule.steps_per_phase if self.schedule.has_phases else self.weights.publish_every
        return min(-(-step // every) * every, self.trainer.steps)

    def publishes(self, step: int) -> bool:
        """Whether the weights after a step are published."""
        return step == 0 or self.phase_end(step) == step

    def evaluates(self, step: int) -> bool:
        """Whether a published version is due for an evaluation during training: the first at or after each
        eval_steps-th, without the last."""
        return 0 < step < self.trainer.steps and self._is_first_after(step, self.eval_steps)

    def due_evaluation(self, version: int) -> int:
        """Newest version up to `version` that is due for an evaluation during training; 0: none."""
        return next((step for step in range(version, 0, -1) if self.evaluates(step)), 0)

    def keeps(self, step: int) -> bool:
        """Whether a published version is durable: the first, the last, the first at or after each durable_every-th,
        and each that an evaluator's own engine reads."""
        if step in (0, self.trainer.steps):
            return True
        is_read = self.evaluates(step) and not self.evaluates_on_actors
        return is_read or self._is_first_after(step, self.weights.durable_every)

    @property
    def uses_deltas(self) -> bool:
        """Versions that need not be durable are stored as differences; a step changes nearly all float32 weights."""
        return self.weights.may_use_deltas and not self.schedule.has_phases and self.model.dtype == "bfloat16"

    def _is_first_after(self, step: int, every: int) -> bool:
        """Whether `step`, above 0, is the first published version at or after a multiple of `every`; 0: never."""
        before = next(earlier for earlier in range(step - 1, -1, -1) if self.publishes(earlier))
        return every > 0 and self.publishes(step) and step // every > before // every
