"""How many GPUs a configuration uses."""

from pipelinerl_core.config.run import RunConfig


def gpus_of(config: RunConfig, role: str) -> int:
    """GPUs of a role on a host with GPUs: `actor`, `evaluator`, `trainer` or `trainer_node` (the share of a host)."""
    if config.model.device == "cpu":
        return 0
    if role in ("trainer", "trainer_node"):
        return 0 if config.stays_on_cpu else config.trainer.ranks // config.placement.trainer_nodes
    if role not in ("actor", "evaluator") or (config.stays_on_cpu and not config.engine.has_workers):
        return 0
    return config.placement.gpus_per_actor or config.engine.tensor_parallel * config.engine.data_parallel


def needed_gpus(config: RunConfig) -> tuple[int, str]:
    """GPUs that the roles of a run use at the same time, on all hosts, and the sum as text."""
    per_actor, ranks = gpus_of(config, "actor"), gpus_of(config, "trainer") * config.placement.trainer_nodes
    if config.placement.share_gpu:
        needed = max(per_actor, ranks)
        return needed, f"{needed} shared by actor and trainer (placement.share_gpu=true)"
    beside = gpus_of(config, "evaluator") if config.eval_steps and not config.evaluates_on_actors else 0
    terms = [f"trainer.ranks={config.trainer.ranks} x 1", f"placement.actors={config.placement.actors} x {per_actor}"]
    terms += [f"evaluator {beside} (eval.on=own)"] if beside else []
    total = ranks + config.placement.actors * per_actor + beside
    return total, f"{' + '.join(terms)} = {total}"
