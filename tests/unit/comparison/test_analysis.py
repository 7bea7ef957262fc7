"""Arms over seeds, with numbers worked out by hand."""

import json

import pytest

from benchmarks.learning_claims import best_conventional, claim_lines, claims
from pipelinerl_core.comparison import table
from pipelinerl_core.comparison.analysis import (
    ComparedRun,
    active_seconds,
    compare,
    counted_seeds,
    first_crossing,
    has_reached,
    learning_curve,
    num_resumes,
    ratio,
    run_figures,
    spread,
    step_costs,
)
from pipelinerl_core.comparison.figure import figure
from pipelinerl_core.comparison.page import page
from pipelinerl_core.messages import ActorSample
from tests.synthetic_run import START, make_commit


def commits_at(*seconds, epochs=()):
    """Commits 0, 1, ... at these seconds, 100 rollouts a step."""
    made = {}
    for step, at in enumerate(seconds):
        commit = make_commit(step, epoch=epochs[step] if epochs else 2, reserved_at=START + at - 3)
        metrics = {"progress/samples": 100.0 * step, "importance/kl": 0.01 * step, "importance/ess": 0.9}
        made[step] = commit.model_copy(update={"committed_at": START + at, "metrics": metrics})
    return made


def make_run(arm, seed, commits, accuracies, *, emulated=False, report=None):
    return ComparedRun(
        arm=arm,
        seed=seed,
        run_id=f"{arm}-s{seed}",
        code_version="0",
        is_emulated=emulated,
        commits=commits,
        accuracies=accuracies,
        report=report or {"ess_mean": 0.95, "lag": {"mean": 1.5, "max": 4}, "trainer_idle_fraction": 0.1},
    )


def test_the_target_is_crossed_between_two_versions():
    points = [(0.0, 0.2), (10.0, 0.4), (20.0, 0.6)]
    assert first_crossing(points, 0.5) == 15.0
    assert first_crossing(points, 0.2) == 0.0
    assert first_crossing(points, 0.4) == 10.0
    assert first_crossing(points, 0.7) is None
    assert first_crossing([(0.0, 0.25), (10.0, 0.75), (20.0, 0.3), (30.0, 0.9)], 0.5) == 5.0, "the first time counts"


def test_a_run_is_good_enough_when_ten_steps_in_the_mean_are():
    assert not has_reached([0.6] * 9, 0.55)
    assert has_reached([0.6] * 10, 0.55)
    assert has_reached([0.1, *[0.5, 0.6] * 5, 0.0], 0.55)
    assert not has_reached([0.1, *[0.5, 0.6] * 4, 0.5, 0.0], 0.55)


def test_time_between_a_stop_and_a_resume_does_not_count():
    commits = commits_at(0, 10, 12, 500, 502, epochs=(2, 2, 2, 4, 4))
    assert active_seconds(commits) == {0: 0, 1: 10, 2: 12, 3: 14, 4: 16}
    assert num_resumes(commits) == 1
    assert active_seconds(commits_at(0, 10, 12)) == {0: 0, 1: 10, 2: 12}


def test_a_resume_before_the_first_step_counts_from_when_the_trainer_waited():
    commits = commits_at(0, 300, 302, epochs=(2, 4, 4))
    first = commits[1].model_copy(update={"metrics": {"time/reserve_wait_seconds": 5.0}})
    # reserved at 297 after a wait of 5 s: from 292
    assert active_seconds({**commits, 1: first}) == {0: 0, 1: 8, 2: 10}


def test_the_rate_of_a_run_with_several_steps_a_phase_is_that_of_whole_phases():
    # 20 s of generation and two steps of 5 s: 200 rollouts in 30 s.
    commits = commits_at(0, 25, 30, 55, 60, 85, 90, 115)
    commits = {step: commit.model_copy(update={"manifest": None}) if step % 2 else commit
               for step, commit in commits.items()}  # fmt: skip
    figures = run_figures(make_run("a", 0, commits, {}), 0)
    assert figures["rollouts_per_second"] == pytest.approx(200 / 30)
    assert figures["step_seconds"] == pytest.approx(15)


def test_figures_of_a_run():
    run = make_run("a", 0, commits_at(0, 10, 12, 14), {0: 0.2, 1: 0.4, 3: 0.6, 9: 0.9})
    assert [(point.version, point.seconds, point.samples) for point in learning_curve(run)] == [
        (0, 0, 0),
        (1, 10, 100),
        (3, 14, 300),
    ]
    figures = run_figures(run, 0.5)
    assert figures["time_to_target_seconds"] == pytest.approx(12.0)
    assert figures["samples_to_target"] == pytest.approx(200.0)
    assert figures["samples_per_second"] == pytest.approx(300 / 14)
    assert figures["rollouts_per_second"] == pytest.approx(200 / 4)
    assert figures["kl_mean"] == pytest.approx(0.015)
    assert (figures["ess_mean"], figures["lag_mean"], figures["lag_max"]) == (0.95, 1.5, 4.0)
    assert figures["actor_idle_fraction"] is None
    assert figures["best_accuracy"] == 0.6


def test_a_run_without_steps_has_no_figures_but_does_no_harm():
    figures = run_figures(make_run("a", 0, commits_at(0), {0: 0.2}, report={}), 0.5)
    assert figures["time_to_target_seconds"] is None
    assert figures["samples_per_second"] is None
    assert figures["best_accuracy"] == 0.2


def test_spread_over_seeds():
    assert spread({0: 2.0, 1: 4.0}) == {
        "mean": 3.0, "std": pytest.approx(2**0.5), "half_width": pytest.approx(12.706), "low": 2.0, "high": 4.0,
        "by_seed": {"0": 2.0, "1": 4.0},
    }  # fmt: skip
    figures = spread({0: 2.0, 1: None})
    assert (figures["mean"], figures["std"], figures["half_width"]) == (2.0, None, None)
    # t of 2 degrees of freedom is 4.303; of 19, the factor of 10 degrees: 2.228
    assert spread({0: 1.0, 1: 2.0, 2: 3.0})["half_width"] == pytest.approx(4.303 / 3**0.5)
    assert spread({seed: seed % 2 for seed in range(20)})["half_width"] == pytest.approx(
        2.228 * 0.513 / 20**0.5, 1e-3
    )
    assert spread({0: None})["mean"] is None


def test_a_ratio_is_taken_seed_by_seed():
    arm, reference = {"t": spread({0: 30.0, 1: 10.0, 2: None})}, {"t": spread({0: 10.0, 1: 5.0, 2: 7.0})}
    figures = ratio(arm, reference, "t")
    assert figures["by_seed"] == {"0": 3.0, "1": 2.0, "2": None}
    assert figures["mean"] == 2.5, "not 20 / 7.33"


def test_means_are_over_seeds_that_all_arms_have_run():
    runs = [make_run(arm, seed, {}, {}) for arm, seed in (("a", 0), ("b", 0), ("a", 1))]
    assert counted_seeds(runs, ["a", "b"]) == [0]
    assert counted_seeds(runs[:1], ["a", "b"]) == [0], "better than nothing"
    assert counted_seeds([], ["a", "b"]) == []


def test_an_arm_whose_seeds_no_other_arm_has_run_is_named():
    runs = [make_run(arm, seed, commits_at(0, 6, 12), {2: 0.5}) for arm, seed in (("a", 0), ("b", 1), ("b", 2))]
    document, _ = example(**compare(runs, ["a", "b", "c"], "a", 0.5))
    assert (list(document["arms"]), document["seeds"], document["left_out"]) == (["a"], [0], {"b": [1, 2]})
    assert "b is left out: it has run with seeds 1, 2 only." in table.markdown(document)


def example(**changes):
    """pipeline reaches 0.5 at 6 and 8 s, conventional-1 at 12 and 12 s, conventional-4 at 9 and 12 s."""
    ends = {"pipeline": (12, 16), "conventional-1": (24, 24), "conventional-4": (18, 24)}
    runs = [
        make_run(arm, seed, commits_at(0, end / 2, end), {0: 0.3, 2: 0.7}, emulated=arm == "pipeline")
        for seed in (0, 1)
        for arm, end in ((arm, pair[seed]) for arm, pair in ends.items())
    ]
    document = {
        "name": "example", "target": 0.5, "reference": "pipeline", "failed": {},
        "dropped": ["seed 2 dropped: budget"],
        "arms_settings": {arm: [] for arm in ends},
        "runs": [{"run_id": run.run_id, "arm": run.arm, "figures": run_figures(run, 0.5)} for run in runs],
        **compare(runs, list(ends), "pipeline", 0.5),
        **changes,
    }  # fmt: skip
    return document, runs


def test_the_table_says_how_much_sooner_the_reference_was():
    document, _ = example()
    assert document["seeds"] == [0, 1]
    over = document["arms"]["conventional-1"]["over_reference"]["time_to_target_seconds"]
    assert over["by_seed"] == {"0": 2.0, "1": 1.5}
    text = table.markdown(document)
    assert "| conventional-1 | 12 ± 0 | 1.75 (1.50 to 2.00) | 100 ± 0 |" in text
    assert "| pipeline | 7 ± 1 | 1.00 (1.00 to 1.00) |" in text
    assert "seed 2 dropped: budget." in text
    json.dumps(document, allow_nan=False)


def test_the_table_has_the_best_accuracy_and_says_that_one_seed_may_be_chance():
    document, _ = example()
    place = table.headers(document).index("best accuracy")
    assert {row[place] for row in table.rows(document)} == {"0.700"}
    assert "may be chance" not in table.markdown(document)
    assert "one seed: a difference may be chance" in table.markdown({**document, "seeds": [0]})


def test_without_a_target_the_table_compares_accuracies_at_the_last_step():
    ends = {"lr=1": (0.5, 0.7), "lr=2": (0.6, 0.9)}
    runs = [
        make_run(arm, seed, commits_at(0, 6, 12), {0: 0.3, 1: 0.95, 2: pair[seed]}, report={"reward_last": 0.25})
        for arm, pair in ends.items()
        for seed in (0, 1)
    ]
    document, _ = example(target=0.0, reference="lr=1", **compare(runs, [*ends, "lr=3"], "lr=1", 0.0))
    assert document["seeds"] == [0, 1], "an arm without a run takes no seed from the others"
    first, second = (entry for entry in document["arms"].values())
    assert first["last_accuracy"]["mean"] == pytest.approx(0.6)
    assert second["minus_reference"]["by_seed"] == {"0": pytest.approx(0.1), "1": pytest.approx(0.2)}
    assert second["time_to_target_seconds"]["mean"] is None
    text = table.markdown(document)
    assert "| lr=2 | 0.750 ± 1.906 | +0.150 ± 0.635 | 0.950 ± 0.000 | 0.250 ± 0.000 | - | 12 ± 0 |" in text
    assert "half of the 95 % confidence interval" in text
    svg = figure(document, runs)
    assert svg.count('class="ring arm') == 2, "a point for each arm"
    assert "target" not in svg.partition("</style>")[2]
    assert "Highest last accuracy: lr=2, 0.750 ± 1.906." in page({**document, "runs": []}, svg)


def test_a_sweep_without_evaluations_compares_rewards_and_has_no_panels_of_accuracy():
    runs = [
        make_run(arm, 0, commits_at(0, 6, 12), {}, report={"reward_last": reward})
        for arm, reward in (("a", 0.2), ("b", 0.4))
    ]
    document, _ = example(target=0.0, reference="a", **compare(runs, ["a", "b"], "a", 0.0))
    svg = figure(document, runs)
    assert "Accuracy" not in svg
    assert "Effective sample size" in svg
    assert "<p " not in svg, "HTML would end the figure"
    assert "Highest reward at the end: b, 0.400." in page({**document, "runs": []}, svg)


def test_emulation_is_said_in_table_figure_and_page():
    document, runs = example()
    svg = figure(document, runs)
    assert document["emulated"]
    assert "Emulated accelerators" in table.markdown(document)
    assert "seeds 0, 1, emulated accelerators</text>" in svg
    assert "<h1>example: target 0.5, seeds 0, 1, emulated accelerators</h1>" in page(document, svg)


def test_real_work_that_was_slower_than_the_emulated_work_is_reported():
    report = {"emulation": {"decode_overrun_seconds": 1.0, "train_overrun_seconds": 0.4}}
    run = make_run("a", 0, commits_at(0, 10, 14), {}, emulated=True, report=report)
    assert compare([run], ["a"], "a", 0.5)["overrun"] == {"a-s0": pytest.approx(0.1)}


def test_the_figure_has_a_line_for_each_arm_in_each_panel_and_the_target():
    document, runs = example()
    svg = figure(document, runs)
    # accuracy twice, ESS and KL; no lag in these commits
    assert svg.count('class="line arm2"') == 4
    assert svg.count('class="faint arm2"') == 4, "a thin line per seed and panel of accuracy"
    assert svg.count('class="faint target"') == 2


def test_the_page_links_each_run_to_its_report():
    document, runs = example()
    html = page(document, figure(document, runs))
    assert 'href="../../conventional-4-s1/report.html"' in html
    assert "Time to 0.5, divided by the time of pipeline: conventional-1 1.75, conventional-4 1.50." in html


def test_a_comparison_of_nothing_has_a_table_and_a_page():
    document, _ = example(**compare([], ["a", "b"], "a", 0.5), runs=[])
    assert "seeds none." in table.markdown(document).lower()
    assert "No ratio yet" in page(document, figure(document, []))


def test_the_claims_are_about_the_best_conventional_arm():
    document, _ = example()
    assert best_conventional(document["arms"]) == "conventional-4"
    claim_values = claims(document)
    assert claim_values["sooner_than_best_conventional"]["mean"] == 1.5
    assert claim_values["sooner_than_one_step_a_phase"]["mean"] == 1.75
    assert claim_values["rollouts_of_one_step_a_phase"]["by_seed"] == {"0": 2.0, "1": 1.5}
    assert claim_values["april_rollouts_of_synchronous"] is None
    assert claim_values["ess_less_than_best_conventional"]["mean"] == 0.0
    assert (
        "pipeline reaches 0.5 1.50 (1.50 to 1.50) times sooner than conventional-4, the best of them"
        in claim_lines(document)
    )


def test_a_ratio_is_said_once_if_one_step_a_phase_is_the_best():
    document, _ = example()
    arms = {name: entry for name, entry in document["arms"].items() if name != "conventional-4"}
    sooner = [line for line in claim_lines({**document, "arms": arms}) if "sooner" in line]
    assert sooner == ["pipeline reaches 0.5 1.75 (1.50 to 2.00) times sooner than conventional-1, the best of them"]


def test_an_arm_that_missed_the_target_with_one_seed_is_not_the_best():
    times = {"conventional-1": {0: 20.0, 1: 20.0}, "conventional-2": {0: 10.0, 1: None}}
    assert (
        best_conventional({name: {"time_to_target_seconds": spread(by_seed)} for name, by_seed in times.items()})
        == "conventional-1"
    )
    assert best_conventional({}) is None


def costly(step, *, engine, trainer, epoch=2):
    """A commit at which one engine and the trainer have used this much CPU."""
    sample = ActorSample(
        at=0.0, engine_version=step, running=1, waiting=0, concurrency=1, num_tokens=1, running_seconds=0.0,
        counters={"cpu_seconds": engine},
    )  # fmt: skip
    update = {"actors": {"actor-0/1": sample}, "metrics": {"time/cpu_seconds": trainer}}
    return make_commit(step, epoch=epoch).model_copy(update=update)


def test_a_step_has_its_cost_on_the_clock_and_on_the_cores():
    commits = {step: costly(step, engine=5.0 + 0.5 * step, trainer=9.0 + 0.75 * step) for step in range(4)}
    seconds = {0: 0.0, 1: 10.0, 2: 11.0, 3: 12.0}
    assert step_costs(commits, seconds) == {
        "step_seconds": 1.0, "engine_cpu_seconds": 0.5, "trainer_cpu_seconds": 0.75
    }  # fmt: skip
    commits[3] = costly(3, engine=6.5, trainer=0.1, epoch=4)
    assert step_costs(commits, seconds)["trainer_cpu_seconds"] is None, "it has started again"
    assert step_costs({0: commits[0]}, seconds)["step_seconds"] is None


def test_the_pipeline_is_measured_against_the_bound_of_its_cores():
    # 0.5 and 0.75 CPU seconds in a step of 1 s: a core each allows 0.75 s, two shared cores (0.5 + 0.75) / 2 s.
    commits = {step: costly(step, engine=0.5 * step, trainer=0.75 * step) for step in range(4)}
    commits = {step: commit.model_copy(update={"committed_at": START + step}) for step, commit in commits.items()}
    document = {"target": 0.5, **compare([make_run("pipeline", 0, commits, {})], ["pipeline"], "pipeline", 0.5)}
    assert claims(document)["share_of_bound_own_cores"]["mean"] == pytest.approx(0.75)
    assert claims(document)["share_of_bound_shared_cores"]["mean"] == pytest.approx(0.625)
