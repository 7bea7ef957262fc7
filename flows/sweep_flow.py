"""The sweep flow: a comparison whose arms are the combinations of values of some settings."""

from typing import Annotated, Any

from prefect import flow
from pydantic import Field

from pipelinerl.flows.compare_flow import Deployment, Limit, Name, Target, compare_runs
from pipelinerl.flows.parameters import described
from pipelinerl.flows.train_flow import Override, Overrides, Preset, Root
from pipelinerl_core.comparison.plan import plan_sweep

Grid = Annotated[
    list[Override],
    Field(
        description='Settings with their values, such as "learner.lr=1e-6,3e-6" and "seed=0,1,2": one run for each '
        "combination. A comma inside of quotes, brackets or braces belongs to a value.",
        json_schema_extra={"minItems": 1},
    ),
]


@flow(name="sweep", persist_result=False)
@described
def sweep(
    grid: Grid,
    preset: Preset = "quickstart",
    overrides: Overrides = (),
    target: Target = 0.0,
    limit: Limit = 1,
    deployment: Deployment = "",
    name: Name = "",
    root: Root = "",
) -> dict[str, Any]:
    """Train with every combination of values and every seed. The same parameters, or a retry, continue the sweep.

    Returns comparison.json. Raises RunsFailed if a run failed, after the other runs were compared.
    """
    plan = plan_sweep(preset, grid, overrides=overrides, target=target, name=name, limit=limit, deployment=deployment)
    return compare_runs(plan, root)
