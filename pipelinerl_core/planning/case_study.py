"""The case study of the PipelineRL paper (arXiv:2509.19128, appendix A.4) beside the results of this model.

128 accelerators, a batch of 128, lengths uniform from 1 to L. The paper prints neither L, tau nor the values of the
measured curve U(h), but the rates that they give. Three of these rates determine what the model needs:

    tau      = 128 / 26.02    conventional training has 26.02 tokens per flash on 128 accelerators
    U(192)   = 16.9 / 44      44 accelerators with 192 sequences each generate 16.9 tokens per flash
    U(128)   = 0.275          conventional generation with G = 133 has 18.3 tokens per flash

U is constant after 192 sequences: a curve that rises further would move the largest speedup to a lag above 133.
Hence these rates agree by construction; the best setting, its lag and the speedup are results. L hardly matters,
because only L over the mean length, 2 L / (L + 1), enters.
"""

from typing import Any

from pipelinerl_core.planning.closed_form import Conventional, Pipeline, System, best_pipeline, conventional
from pipelinerl_core.planning.lengths import Lengths
from pipelinerl_core.planning.utilization import UtilizationCurve

STEPS_PER_PHASE = 133
"""G of the conventional system; lag G - 1 = 132."""
PUBLISHED = {
    "sequences": 192,
    "generators": 44,
    "lag": 133,
    "pipeline_generation": 16.9,
    "pipeline_training": 17.08,
    "pipeline_throughput": 16.9,
    "conventional_generation": 18.3,
    "conventional_training": 26.02,
    "conventional_throughput": 10.7,
    "ratio": 1.57,
}
"""The paper's figures; tokens per flash. The paper gives the lag as "about 133"."""
_LABELS = {
    "sequences": "best H, sequences per accelerator",
    "generators": "best I, accelerators that generate",
    "lag": "lag of the best setting",
    "pipeline_generation": "pipeline, generation",
    "pipeline_training": "pipeline, training",
    "pipeline_throughput": "pipeline, throughput",
    "conventional_generation": "conventional, generation",
    "conventional_training": "conventional, training",
    "conventional_throughput": "conventional, throughput",
    "ratio": "pipeline over conventional",
}
_LONGEST = 2048
_LAGS = (1, 4, 8, 16, 32, 64, 96, 132, 160, 192, 256)
_LARGEST_LAG = 256
"""The lag with the largest speedup is searched up to this lag."""


def case_study_system() -> System:
    """Accelerators and work of the case study."""
    return System(
        accelerators=128,
        batch=128,
        lengths=Lengths.uniform(_LONGEST),
        utilization=UtilizationCurve(((128.0, 0.275), (192.0, 16.9 / 44))),
        train_flashes=128 / 26.02,
    )


def case_study() -> dict[str, Any]:
    """The document of `pipelinerl simulate --paper --json`.

    results: the model's figures at a lag of G - 1, with the keys of `published`; by_lag: the same at other lags;
    best_lag: the lag with the largest ratio.
    """
    system = case_study_system()
    by_lag = {
        lag: _results(best_pipeline(system, lag), conventional(system, lag + 1)) for lag in range(1, _LARGEST_LAG + 1)
    }
    max_lag = STEPS_PER_PHASE - 1
    return {
        "accelerators": system.accelerators,
        "batch": system.batch,
        "longest": system.lengths.longest,
        "mean_length": system.lengths.mean,
        "train_flashes": system.train_flashes,
        "utilization": [list(point) for point in system.utilization.points],
        "steps_per_phase": STEPS_PER_PHASE,
        "max_lag": max_lag,
        "results": by_lag[max_lag],
        "published": PUBLISHED,
        "by_lag": {str(lag): by_lag[lag] for lag in _LAGS},
        "best_lag": max(by_lag, key=lambda lag: by_lag[lag]["ratio"]),
    }


def case_study_lines(document: dict[str, Any]) -> list[str]:
    """The document as text."""
    curve = ", ".join(f"{utilization:.3f} at {sequences:g}" for sequences, utilization in document["utilization"])
    results, published = document["results"], document["published"]
    return [
        "Case study of arXiv:2509.19128, appendix A.4. Throughput in tokens per flash, lag in optimizer steps.",
        f"{document['accelerators']} accelerators, batch {document['batch']}, lengths uniform from 1 to "
        f"L = {document['longest']}, tau = {document['train_flashes']:.2f} flashes per trained token",
        f"utilization U(h): {curve} sequences, linear between, constant after",
        f"lag at most G - 1 = {document['max_lag']}: conventional trains G = {document['steps_per_phase']} steps "
        "per phase",
        "",
        f"{'':36}{'model':>9}{'paper':>9}",
        *(f"{label:36}{results[key]:>9.4g}{published[key]:>9.4g}" for key, label in _LABELS.items()),
        "",
        f"{'lag at most':>11}{'H':>6}{'I':>6}{'pipeline':>11}{'conventional':>14}{'ratio':>8}",
        *(
            f"{lag:>11}{row['sequences']:>6}{row['generators']:>6}{row['pipeline_throughput']:>11.2f}"
            f"{row['conventional_throughput']:>14.2f}{row['ratio']:>8.2f}"
            for lag, row in document["by_lag"].items()
        ),
        f"largest ratio: at a lag of {document['best_lag']}; paper: about {published['lag']}",
    ]


def _results(best: Pipeline, alternating: Conventional) -> dict[str, float]:
    return {
        "sequences": best.sequences,
        "generators": best.generators,
        "lag": best.lag,
        "pipeline_generation": best.generation,
        "pipeline_training": best.training,
        "pipeline_throughput": best.throughput,
        "conventional_generation": alternating.generation,
        "conventional_training": alternating.training,
        "conventional_throughput": alternating.throughput,
        "ratio": best.throughput / alternating.throughput,
    }
