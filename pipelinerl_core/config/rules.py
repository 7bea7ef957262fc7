"""Rules between sections, and the arithmetic of the admission window behind them (docs/scheduling.md).

Symbols: N = trainer.groups_per_step, G = rollouts.group_size, W = (max_lag + 1) * N = groups outstanding at most.
"""

import math
import re

from pydantic import ValidationError

from pipelinerl_core.config.environments import CodeEnvironment
from pipelinerl_core.config.settings import Settings, TaskSections

MIN_KEPT_VERSIONS = 4
"""Smallest weights.keep, except 0: two steps may be uncommitted, and a trainer may start from the step before."""
_SET_NAME = re.compile(r"[a-z0-9_]{1,40}")


def groups_in_flight(config: Settings) -> int:
    """Groups that fill every slot of every actor: ceil(actors * concurrency / G)."""
    return -(-config.engine.concurrency * config.placement.actors // config.rollouts.group_size)


def lag_of_full_engines(config: Settings, spread: float = 1.0) -> int:
    """Smallest schedule.max_lag at which no slot stays empty: 1 + ceil(actors * concurrency * spread / (G * N)).

    spread: longest over mean length of the rollouts of a group. A group counts against the window until its longest
    rollout has ended, while the slots of its other rollouts already generate new groups, which count too. The 1 is
    the step being trained.
    """
    sequences = config.engine.concurrency * config.placement.actors
    return 1 + math.ceil(sequences * spread / (config.rollouts.group_size * config.trainer.groups_per_step))


def empty_slots(config: Settings) -> list[str]:
    """A line if the schedule admits fewer sequences than the engines have slots."""
    needed, window = groups_in_flight(config), config.window_groups
    if needed <= window or config.takes_turns:
        return []
    return [
        f"engine.concurrency={config.engine.concurrency} x placement.actors={config.placement.actors} has room for "
        f"{needed} groups, of which schedule.max_lag={config.schedule.max_lag} admits {window}: slots stay empty. "
        f"schedule.max_lag={-(-needed // config.trainer.groups_per_step) - 1} fills them"
    ]


def explain_schedule(config: Settings) -> list[str]:
    """The admission window of the schedule, as lines of text."""
    schedule, num = config.schedule, config.trainer.groups_per_step
    window = f"window W = (max_lag + 1) * groups_per_step = ({schedule.max_lag} + 1) * {num} = {config.window_groups}"
    full = f"{groups_in_flight(config)} groups fill the slots"
    if schedule.has_phases:
        phase = schedule.steps_per_phase
        return [f"{schedule.kind}: {phase} x {num} = {phase * num} groups, then {phase} steps; {full}"]
    if schedule.leases_more:
        outstanding = math.ceil(schedule.alpha * num)
        return [
            f"{schedule.kind}: {schedule.alpha:g} x {num} = {outstanding} groups in flight, a step at {num}; {full}"
        ]
    lags = ", ".join(f"{spread} -> {lag_of_full_engines(config, spread)}" for spread in (1, 2, 4, 8))
    return [
        f"{schedule.kind}: {window} groups; {full}",
        f"max_lag that keeps every slot full, by longest over mean length in a group: {lags}",
    ]


def first_problem(config: Settings) -> str | None:
    """The message (what, why, what to set) of the first broken rule; None if the configuration breaks no rule."""
    return (
        _parts_problem(config)
        or _eval_problem(config)
        or _publish_problem(config)
        or _schedule_problem(config)
        or _placement_problem(config)
        or _engine_problem(config)
        or _loss_problem(config)
        or _learner_problem(config)
        or _weights_problem(config)
        or _arithmetic_problem(config)
    )


def _parts_problem(config: Settings) -> str | None:
    """A problem of prompts, reward or environment: of the run, or of one part of its mixture."""
    if not config.mixture:
        return _task_problem(config)
    for name in config.mixture:
        key = f"mixture.{name[:40]}"
        if not _SET_NAME.fullmatch(name):
            return f"{key}: a name has lower-case letters, digits and _, at most 40. Rename the part"
        if name in config.eval.sets:
            return f"{key} and eval.sets.{name} have the same name. Rename one of them"
        if config.mixture[name].max_tokens > config.rollouts.max_tokens:
            return (
                f"{key}.max_tokens={config.mixture[name].max_tokens} is above rollouts.max_tokens="
                f"{config.rollouts.max_tokens}, the limit of every part. Set rollouts.max_tokens higher"
            )
        try:
            problem = _task_problem(config.with_part(name))
        except ValidationError as error:
            problem = _section_problem(error)
        if problem is not None:
            return f"{key}: {problem}"
    return None


def _task_problem(config: Settings) -> str | None:
    return (
        _prompts_problem(config)
        or _overlong_problem(config)
        or _reward_problem(config)
        or _environment_problem(config)
    )


def _section_problem(error: ValidationError) -> str:
    """The first mistake in the prompts of a set of eval.sets, or in a section of a part of the mixture."""
    detail = error.errors()[0]
    section, *key = map(str, detail["loc"])
    owner = section
    if key and TaskSections.model_fields[section].discriminator:
        kind, *key = key
        owner = f"{section}.kind={kind}"
    if detail["type"] == "extra_forbidden":
        return f"{'.'.join(key)}: no key of {owner}"
    if detail["type"] == "value_error":  # names its keys
        return detail["msg"].removeprefix("Value error, ")
    return f"{'.'.join(key) or 'kind'}: {detail['msg'].lower()}"


def _prompts_problem(config: Settings) -> str | None:
    tasks = getattr(config.prompts, "tasks", ())
    for key in ("options", "levels"):
        if unused := [task for task in getattr(config.prompts, key, ()) if task not in tasks]:
            return (
                f"prompts.{key}.{unused[0]}: the task is not in prompts.tasks={list(tasks)}. Add the task, or remove "
                f"prompts.{key}.{unused[0]}"
            )
    system = config.prompts.system
    if system not in ("default", "none") and not config.model.chat_template:
        return (
            f"prompts.system={system[:40]!r} is a message of a chat template, but model.chat_template=false. "
            "Set model.chat_template=true, or write the text into prompts.template"
        )
    return None


def _eval_problem(config: Settings) -> str | None:
    for name in config.eval.sets:
        if not _SET_NAME.fullmatch(name):
            return f"eval.sets.{name[:40]}: a name has lower-case letters, digits and _, at most 40. Rename the set"
        try:
            changed = config.with_set(name)
            problem = _prompts_problem(changed)
            if changed.prompts.from_environment and not config.environment.path:
                problem = "kind=environment takes the tasks of environment.path, which is empty. Set environment.path"
            elif _suits_no_environment(changed, config):
                problem = (
                    f"kind={changed.prompts.kind} does not suit environment.path={config.environment.path}, which "
                    f"plays the tasks of prompts.kind={config.prompts.kind}. Set the same kind"
                )
        except ValidationError as error:
            problem = _section_problem(error)
        if problem is not None:
            return f"eval.sets.{name}: {problem}"
    return None


def _suits_no_environment(of_set: Settings, config: Settings) -> bool:
    """A builtin environment plays either rows or tasks of its own, except for the code exercises, which have both.

    A class of the user may play both.
    """
    path = config.environment.path
    has_both = not path.startswith("builtin:") or path == CodeEnvironment().path
    is_other = of_set.prompts.from_environment != config.prompts.from_environment
    return is_other and not has_both and of_set.environment == config.environment and not config.mixture


def _engine_problem(config: Settings) -> str | None:
    engine = config.engine
    if config.emulation.accelerators and not engine.has_clock:
        return "emulation.accelerators requires the embedded engine. Set engine.kind=embedded"
    if config.weights.is_broadcast and not engine.has_workers:
        return (
            f"weights.transport=nccl broadcasts to the workers of engines, but engine.kind={engine.kind} has no "
            "workers. Set weights.transport=shm, or engine.kind=vllm"
        )
    if 0 < engine.batched_tokens < engine.concurrency:
        return (
            f"engine.batched_tokens={engine.batched_tokens} is below engine.concurrency={engine.concurrency}, but a "
            "step has a token of each sequence. Set engine.batched_tokens higher, or engine.concurrency lower"
        )
    return None


def _publish_problem(config: Settings) -> str | None:
    max_lag = config.schedule.max_lag
    behind = config.weights.publish_every - 1
    if max_lag < behind:
        return (
            f"weights.publish_every={config.weights.publish_every} leaves actors {behind} steps behind, but "
            f"schedule.max_lag={max_lag}: no group could be leased before the next version. "
            f"Set schedule.max_lag to at least {behind}, or weights.publish_every=1"
        )
    return None


def _schedule_problem(config: Settings) -> str | None:
    schedule = config.schedule
    kind, phase, alpha, max_lag = schedule.kind, schedule.steps_per_phase, schedule.alpha, schedule.max_lag
    if phase > max_lag + 1:
        return (
            f"schedule.steps_per_phase={phase} trains rollouts that are up to {phase - 1} steps old, but "
            f"schedule.max_lag={max_lag}. Set schedule.max_lag={phase - 1}, or schedule.steps_per_phase={max_lag + 1}"
        )
    if alpha > max_lag + 1:
        return (
            f"schedule.alpha={alpha:g} keeps up to {alpha:g} steps' worth of groups, the last of which is trained at "
            f"a lag of {math.ceil(alpha) - 1}, but schedule.max_lag={max_lag}. Set schedule.max_lag="
            f"{math.ceil(alpha) - 1}, or schedule.alpha to at most {max_lag + 1}"
        )
    if schedule.leases_more and schedule.stale == "wait":
        return (
            "schedule.stale=wait waits for unfinished groups, but schedule.kind=april never waits for them. "
            "Set schedule.stale=mask or drop"
        )
    if schedule.leases_more and config.engine.kv == "drain":
        return (
            "engine.kv=drain finishes the running sequences before a swap, but schedule.kind=april swaps while "
            "sequences are paused. Set engine.kv=keep or recompute"
        )
    if config.takes_turns and config.weights.publish_every > 1:
        return (
            f"weights.publish_every={config.weights.publish_every}: schedule.kind={kind} sets when weights "
            "are published. Set weights.publish_every=1"
        )
    emulation = config.emulation
    if emulation.accelerators and not config.takes_turns and emulation.generators >= emulation.accelerators:
        return (
            f"emulation.generators={emulation.generators} of emulation.accelerators={emulation.accelerators} leave "
            "none to train on. Set emulation.generators lower"
        )
    return None


def _placement_problem(config: Settings) -> str | None:
    nodes = config.placement.trainer_nodes
    if nodes > 1 and config.placement.kind == "local":
        return (
            f"placement.trainer_nodes={nodes} needs several hosts, but placement.kind=local uses one. "
            "Set placement.kind=work_pools"
        )
    if config.trainer.ranks % nodes:
        return (
            f"trainer.ranks={config.trainer.ranks}: placement.trainer_nodes={nodes} hosts need equally many ranks. "
            f"Set trainer.ranks to a multiple of {nodes}"
        )
    if config.placement.share_gpu and (config.placement.actors > 1 or config.trainer.ranks > 1):
        return (
            "placement.share_gpu is one GPU for one actor and one rank, but placement.actors="
            f"{config.placement.actors} and trainer.ranks={config.trainer.ranks}. Set both to 1, or share_gpu=false"
        )
    if config.placement.share_gpu and config.placement.kind != "local":
        return "placement.share_gpu needs actor and trainer on one host. Set placement.kind=local"
    if config.gpu_turns and config.learner.splits_state:
        return "placement.share_gpu=turns needs the optimizer of learner.kind=torch. Set learner.kind=torch"
    if config.gpu_turns and config.eval_steps and not config.evaluates_on_actors:
        return "placement.share_gpu=turns has no turn for the engine of eval.on=own. Set eval.on=actors"
    if config.placement.cores == "own" and config.placement.kind != "local":
        return (
            f"placement.cores=own assigns the cores of one host, but placement.kind={config.placement.kind} uses "
            "several hosts. Set placement.cores=shared"
        )
    return None


def _loss_problem(config: Settings) -> str | None:
    if 0 < config.loss.sequence_ratio_max <= 1:
        return (
            f"loss.sequence_ratio_max={config.loss.sequence_ratio_max:g} would leave out every rollout: on policy, "
            "the ratio of a rollout is 1. Set loss.sequence_ratio_max above 1, or to 0"
        )
    if 0 < getattr(config.loss, "dual_clip", 0.0) <= 1:
        return (
            "loss.dual_clip of at most 1 would leave no gradient to negative advantages: on policy, the ratio of a "
            "token is 1. Set loss.dual_clip above 1, or to 0"
        )
    if config.loss.ref_model and not config.loss.kl_coefficient:
        return (
            f"loss.ref_model={config.loss.ref_model} is not used with loss.kl_coefficient=0. Set loss.kl_coefficient "
            "too, or remove loss.ref_model"
        )
    for name in ("teacher_coefficient", "reward_coefficient"):
        if not config.loss.teacher and getattr(config.loss, name) != 1:
            return (
                f"loss.{name}={getattr(config.loss, name):g} is not used without a teacher. Set loss.teacher, or "
                f"remove loss.{name}"
            )
    if config.loss.kl_weighted and not config.loss.kl_coefficient:
        return (
            "loss.kl_weighted=true is not used with loss.kl_coefficient=0. Set loss.kl_coefficient too, or "
            "loss.kl_weighted=false"
        )
    if config.loss.divides_by_mean and any(part.reward.overlong_tokens for part in config.parts.values()):
        return (
            "loss.advantage=max_likelihood divides by the mean reward of a group, and the penalty of "
            "reward.overlong_tokens may make it negative. Set another loss.advantage, or reward.overlong_tokens=0"
        )
    is_default = config.loss.value_coefficient == type(config.loss).model_fields["value_coefficient"].default
    if not config.loss.has_value_head and not is_default:
        return (
            f"loss.value_coefficient={config.loss.value_coefficient:g} is not used with loss.advantage="
            f"{config.loss.advantage}. Set loss.advantage=value, or remove loss.value_coefficient"
        )
    is_of_sum = not (config.loss.has_own_advantages or config.loss.decouples_components)
    term = config.other_term if is_of_sum else f"loss.advantage={config.loss.advantage}"
    if config.rollouts.filter_zero_variance and term:
        return (
            "rollouts.filter_zero_variance=true discards groups of equal rewards, which have a gradient with "
            f"{term}. Set rollouts.filter_zero_variance=false, or change {term}"
        )
    return _own_objective_problem(config)


def _own_objective_problem(config: Settings) -> str | None:
    loss = config.loss
    if loss.has_own_advantages and not loss.advantage_function:
        return "loss.advantage=custom: loss.advantage_function is not set. Set it to FILE.py:FUNCTION"
    if not loss.has_own_advantages and (loss.advantage_function or loss.advantage_options):
        return (
            f"loss.advantage_function and loss.advantage_options are not used with loss.advantage={loss.advantage}. "
            "Set loss.advantage=custom, or remove them"
        )
    for key, location in loss.own_functions.items():
        if not _names_object(location):
            return (
                f"{key}={location}: names no function. Write FILE.py:FUNCTION, for example my_loss.py:loss, or "
                "package.module:FUNCTION"
            )
    return None


def _names_object(location: str) -> bool:
    place, _, name = location.rpartition(":")
    return name.isidentifier() and (place.endswith(".py") or place.replace(".", "").isidentifier())


def _overlong_problem(config: Settings) -> str | None:
    if config.reward.overlong_tokens > config.rollouts.max_tokens:
        return (
            f"reward.overlong_tokens={config.reward.overlong_tokens} is more than rollouts.max_tokens="
            f"{config.rollouts.max_tokens}: every completion would be overlong. Set reward.overlong_tokens lower"
        )
    return None


def _reward_problem(config: Settings) -> str | None:
    reward = config.reward
    if not reward.function:
        if reward.network or reward.environment or (reward.weights and not config.environment.path):
            return (
                "reward.weights, reward.network and reward.environment are for reward.function, which is empty. "
                "Set reward.function too, or environment.path and the keys of its section"
            )
        return _weights_of_reward_problem(config)
    place, _, names = reward.function.rpartition(":")
    functions = names.split(",")
    if len(set(functions)) < len(functions) or not all(_names_object(f"{place}:{name}") for name in functions):
        return (
            f"reward.function={reward.function}: names no function. Write FILE.py:FUNCTION, for example "
            "my_rewards.py:score, or package.module:FUNCTION"
        )
    if reward.kind != "auto":
        return f"reward.function and reward.kind={reward.kind} both choose the verifier. Remove one of them"
    return _variables_problem("reward.environment", reward.environment) or _weights_of_reward_problem(config)


def _weights_of_reward_problem(config: Settings) -> str | None:
    if config.loss.decouples_components and not config.reward.weights:
        return (
            "loss.advantage=decoupled standardizes each component that reward.weights names, but reward.weights is "
            "empty. Set the weights of the components, for example reward.weights.correct=1"
        )
    return None


def _variables_problem(key: str, names: tuple[str, ...]) -> str | None:
    if hidden := [name for name in names if not name.isidentifier() or name.startswith("PIPELINERL_")]:
        return f"{key} names {hidden[0]!r}, which a user's code cannot get. Name variables of your own"
    return None


def _environment_problem(config: Settings) -> str | None:
    environment, reward = config.environment, config.reward
    if not environment.path:
        if environment != type(environment)():
            keys = ", ".join(f"environment.{key}" for key in environment.model_dump(exclude_defaults=True))
            return f"{keys}: not used without environment.path. Set environment.path too"
        if config.prompts.from_environment:
            return "prompts.kind=environment: environment.path is empty. Set environment.path to FILE.py:CLASS"
        return None
    if environment.path == CodeEnvironment().path and environment.isolation == "none":
        return (
            f"environment.isolation=none, but environment.path={environment.path} runs programs of a model. Remove "
            "environment.isolation"
        )
    if not _names_object(environment.path):
        return (
            f"environment.path={environment.path}: names no class. Write FILE.py:CLASS, for example my_env.py:Guess, "
            "or package.module:CLASS, or builtin:NAME"
        )
    if not environment.is_judged and (reward.function or reward.kind != "auto"):
        chosen = f"reward.function={reward.function}" if reward.function else f"reward.kind={reward.kind}"
        return f"environment.path scores its episodes, and {chosen} chooses a verifier. Remove one of them"
    if config.prompts.from_environment and not environment.has_tasks:
        return "prompts.kind=environment: an agent program has no tasks. Set prompts.kind=file, for example"
    if environment.needs_own_tasks and not config.prompts.from_environment:
        return (
            f"environment.kind={environment.kind} has tasks of its own, but prompts.kind={config.prompts.kind}. Set "
            "prompts.kind=environment"
        )
    return _variables_problem("environment.variables", environment.variables)


def _learner_problem(config: Settings) -> str | None:
    learner, steps = config.learner, config.trainer.steps
    if learner.final_lr_share == 0 and 0 < learner.decay_steps < steps:
        return (
            f"learner.final_lr_share=0: the learning rate is 0 after step {learner.decay_steps}, but trainer.steps="
            f"{steps}. Set learner.final_lr_share above 0"
        )
    if learner.splits_state and not learner.zero_stage and config.model.dtype == "bfloat16":
        return (
            "model.dtype=bfloat16 needs float32 master weights, which learner.zero_stage=0 does not keep. "
            "Set learner.zero_stage to at least 1"
        )
    if learner.offload == "optimizer" and not learner.zero_stage:
        return "learner.offload=optimizer needs learner.zero_stage of at least 1. Set learner.zero_stage=1"
    if learner.offload == "parameters" and learner.zero_stage < 3:
        return "learner.offload=parameters needs learner.zero_stage=3. Set learner.zero_stage=3"
    if learner.attention == "varlen" and config.model.dtype == "float32":
        return (
            "learner.attention=varlen is flash attention, which does not support float32, but model.dtype=float32. "
            "Set learner.attention=auto or flex, or model.dtype=bfloat16"
        )
    if learner.attention in ("varlen", "flex") and config.stays_on_cpu:
        return (
            f"learner.attention={learner.attention} needs a GPU, but model.device={config.model.device} with "
            f"engine.kind={config.engine.kind} computes on the CPU. Set learner.attention=auto, or model.device=cuda"
        )
    if learner.ess_reference and not learner.ess_scaling:
        return (
            f"learner.ess_reference={learner.ess_reference:g} is not used with learner.ess_scaling=false. "
            "Set learner.ess_scaling=true, or remove learner.ess_reference"
        )
    if not learner.lora_rank and (learner.lora_alpha or learner.lora_targets):
        return (
            f"learner.lora_alpha={learner.lora_alpha:g}, learner.lora_targets={list(learner.lora_targets)} are not "
            "used with learner.lora_rank=0. Set learner.lora_rank too, or remove both"
        )
    return None


def _weights_problem(config: Settings) -> str | None:
    if 0 < config.weights.keep < MIN_KEPT_VERSIONS:
        return (
            f"weights.keep={config.weights.keep}: an actor or a starting trainer may still read one of the newest "
            f"{MIN_KEPT_VERSIONS} versions. Set weights.keep={MIN_KEPT_VERSIONS} or more, or 0 to keep all versions"
        )
    if config.weights.is_broadcast and config.placement.share_gpu:
        return (
            "weights.transport=nccl broadcasts between GPUs, but placement.share_gpu gives trainer and actor the "
            "same GPU. Set weights.transport=shm"
        )
    if config.weights.is_broadcast and config.engine.kv == "drain":
        return (
            "weights.transport=nccl waits weights.broadcast_seconds for each engine, but engine.kv=drain first "
            "finishes the running sequences. Set engine.kv=keep or recompute, or weights.transport=shm"
        )
    if config.weights.content != "adapters":
        return None
    if not config.learner.lora_rank:
        return (
            "weights.content=adapters publishes adapters only, but learner.lora_rank=0 trains no adapters. "
            "Set learner.lora_rank too, or weights.content=merged"
        )
    if config.weights.is_broadcast:
        return (
            "weights.transport=nccl broadcasts weights that vLLM's workers load directly, but "
            "weights.content=adapters must be merged first. Set weights.transport=shm or object_store, "
            "or weights.content=merged"
        )
    return None


def _arithmetic_problem(config: Settings) -> str | None:
    if config.rollouts.top_p != 1.0:
        return (
            f"rollouts.top_p={config.rollouts.top_p} truncates the distribution, which breaks the importance "
            "ratio of the loss. Set rollouts.top_p=1"
        )
    if config.engine.deterministic and config.model.dtype != "float32":
        return (
            f"engine.deterministic=true needs exact arithmetic, but model.dtype={config.model.dtype}. "
            "Set model.dtype=float32"
        )
    return None
