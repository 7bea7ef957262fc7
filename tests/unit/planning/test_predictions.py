"""Predictions without a recorded run: roofline, cached calibrations, sweeps, lengths, GPUs."""

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from pipelinerl_core.config.arm import parse_grid
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.resolve import build_config, load_config, override_config
from pipelinerl_core.planning import cache
from pipelinerl_core.planning.calibration import Calibration
from pipelinerl_core.planning.lengths import Lengths
from pipelinerl_core.planning.prediction import inputs, predict
from pipelinerl_core.planning.roofline import Table
from pipelinerl_core.planning.simulator import Work, simulate
from pipelinerl_core.planning.speeds import Line, MeasuredSpeeds
from pipelinerl_core.planning.sweep import best_of, sweep, sweep_document, sweep_figure, sweep_lines
from pipelinerl_core.planning.what_if import Changed, document, lines, on_gpus, parse_speeds, read_lengths, source_of
from pipelinerl_core.supervision.fit import fit_of

RUNS = Path(__file__).parents[2] / "golden" / "runs"
PRESET = load_config("math-7b-16gpu")
NUM_7B = 7_615_283_200
SMALL = {
    "rollouts": {"group_size": 4},
    "trainer": {"groups_per_step": 8, "steps": 30},
    "engine": {"concurrency": 32},
    "schedule": {"max_lag": 4},
}
MEASURED = Calibration(
    config=build_config(SMALL),
    speeds=MeasuredSpeeds(decode=Line(0.01, 1e-4, 8, 32), train=Line(0.05, 1e-4, 1000, 4000)),
    work=Work(lengths=Lengths.uniform(64), prompt_tokens=10, commit_seconds=0.02, sync_seconds=0.05),
    origin="a test",
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PIPELINERL_CACHE", str(tmp_path / "cache"))


# ---- roofline ------------------------------------------------------------------------------------------------------


def test_a_decode_step_of_one_sequence_reads_the_weights_and_an_optimizer_step_computes_eight_flops_per_weight():
    """15.2 GB over 60 % of 3.35 TB/s; 8 FLOPs (6, and 2 for checkpointing) over 40 % of 989 TFLOPS on 8 ranks."""
    speeds = Table(Lengths.of([2])).speeds_of(PRESET)
    multiplied = NUM_7B - 152064 * 3584
    assert speeds.decode_seconds(1) == pytest.approx(2 * NUM_7B / (0.6 * 3.35e12), rel=0.01)
    assert speeds.train_seconds(1000) == pytest.approx(1000 * 8 * multiplied / (8 * 0.4 * 989e12), rel=1e-3)
    assert speeds.decode_seconds(0) == 0


def test_turns_on_one_gpu_cost_both_times_the_moved_state_and_a_prefill_of_the_running_sequences():
    def predicted(share):
        return document(
            Table(), load_config("dapo-1.5b-1gpu", ["placement.gpu=H200", f"placement.share_gpu={share}"])
        )

    turns = predicted("turns")
    (row,) = [row for row in turns["inputs"] if row["input"] == "a turn"]
    state = 12 * fit_of(load_config("dapo-1.5b-1gpu")).num_parameters
    weights = state / 6
    assert row["value"].startswith(f"{2 * (state + weights) / 25e9:.3g} s to move state")
    assert row["source"].startswith("assumed: 25 GB/s")
    assert turns["predicted"]["bottleneck"].endswith("in turns")
    assert not [row for row in predicted("true")["inputs"] if row["input"] == "a turn"]


def test_a_rest_stops_an_engine_for_the_turn_and_the_prefill_of_its_tokens():
    speeds = MEASURED.speeds
    simulated = {
        token_seconds: simulate(
            override_config(MEASURED.config, ["placement.share_gpu=turns", "eval.on=actors"]),
            speeds,
            replace(MEASURED.work, prefill_token_seconds=token_seconds, turn_seconds=0.01),
        )
        for token_seconds in (0.0, 1e-4)
    }
    beside = simulate(MEASURED.config, speeds, MEASURED.work)
    ends = [run.steps[-1].at for run in (beside, simulated[0.0], simulated[1e-4])]
    assert ends == sorted(ends)
    assert ends[1] > ends[0] + 30 * 0.01
    assert simulated[0.0].tokens["trained"] == beside.tokens["trained"]


def test_many_sequences_are_bound_by_flops():
    speeds = Table(Lengths.of([2])).speeds_of(PRESET)
    multiplied = NUM_7B - 152064 * 3584
    assert speeds.decode_seconds(100_000) >= 100_000 * 2 * multiplied / (0.5 * 989e12) * 0.999


def test_each_input_names_its_source():
    kinds = {row["input"]: row["source"].partition(":")[0] for row in inputs(Table(), PRESET)}
    assert kinds["decode step"] == kinds["optimizer step"] == "looked up"
    assert kinds["completions"] == "assumed"
    given = Changed(Table(), 2.0, Lengths.uniform(100))
    assert next(row for row in inputs(given, PRESET) if row["input"] == "completions")["source"].startswith("given")


def test_longer_completions_take_longer_decode_steps_of_the_table():
    shorter, same, longer = (Changed(Table(), factor).speeds_of(PRESET) for factor in (0.5, 1.0, 2.0))
    assert shorter.decode_seconds(64) < same.decode_seconds(64) < longer.decode_seconds(64)
    assert same.decode_seconds(64) == Table().speeds_of(PRESET).decode_seconds(64)


def test_waits_for_tools_are_given_or_named_as_left_out():
    config = override_config(PRESET, ["environment.path=game.py:Game", "reward.kind=auto"])
    assert "waits for the environment. Give --turns and --tool-seconds" in document(Table(), config)["not_simulated"]
    prediction = document(Changed(Table(), turns=4, tool_seconds=600.0), config)
    assert prediction["inputs"][-1]["value"] == "4 of equal length, 600 s between two"
    assert not any("--turns" in text for text in prediction["not_simulated"])
    assert prediction["predicted"]["busy_slots"] < document(Table(), config)["predicted"]["busy_slots"]


def test_unequal_actors_have_a_speed_each():
    slower = Changed(Table(), actor_speeds=(1.0, 0.5))
    config = override_config(PRESET, ["placement.actors=2"])
    prediction = document(slower, config)
    assert prediction["inputs"][-1]["value"] == "speeds 1, 0.5"
    ratio = prediction["predicted"]["steps_per_second"] / document(Table(), config)["predicted"]["steps_per_second"]
    assert ratio == pytest.approx(0.75, rel=0.1)
    with pytest.raises(ConfigError, match=r"--actor-speeds names 2 actors, and placement\.actors=3"):
        document(slower, override_config(PRESET, ["placement.actors=3"]))
    for text in ("1,fast", "1,0", "inf"):
        with pytest.raises(ConfigError, match="give a number above 0 per actor"):
            parse_speeds(text)


def test_a_machine_without_a_calibration_and_an_unknown_accelerator_are_named():
    with pytest.raises(ConfigError, match=r"no calibration of these settings on this machine.*--calibrate"):
        document(source_of(build_config(SMALL)), build_config(SMALL))


def test_a_document_has_the_time_of_the_run_the_bottleneck_and_the_memory():
    config = override_config(PRESET, ["trainer.steps=20", "trainer.groups_per_step=8", "schedule.max_lag=13"])
    prediction = json.loads(json.dumps(document(Table(), config)))
    assert prediction["predicted"]["seconds"] == pytest.approx(20 / prediction["predicted"]["steps_per_second"])
    assert prediction["predicted"]["bottleneck"] == "training"
    assert [role["role"] for role in prediction["memory"]["roles"]] == ["trainer", "actor"]
    assert "bottleneck: training" in lines(prediction)


# ---- cache ---------------------------------------------------------------------------------------------------------


def test_a_calibration_is_found_again_for_the_same_machine_engine_and_learner():
    cache.store_calibration(MEASURED)
    wider = override_config(MEASURED.config, ["engine.concurrency=64", "placement.actors=2", "schedule.max_lag=9"])
    calibration = cache.cached_calibration(wider)
    assert calibration.speeds == MEASURED.speeds
    assert calibration.work.lengths.mean == MEASURED.work.lengths.mean
    assert calibration.work.commit_seconds == 0.02
    assert calibration.origin.startswith("calibration of 20")
    assert predict(calibration, MEASURED.config) == predict(MEASURED, MEASURED.config)
    assert cache.cached_calibration(override_config(MEASURED.config, ["placement.threads=2"])) is None
    assert calibration.other_speeds is None
    lengths = Lengths.of_groups([[1, 2, 2, 2], [50, 60, 60, 60]])
    in_turns = MeasuredSpeeds(decode=Line(0.005, 1e-4, 8, 32), train=Line(0.03, 1e-4, 1000, 4000))
    work = replace(MEASURED.work, lengths=lengths, arrival_seconds=0.01, usable_slots=0.9)
    cache.store_calibration(replace(MEASURED, work=work, other_speeds=in_turns))
    calibration = cache.cached_calibration(MEASURED.config)
    assert calibration.other_speeds == in_turns
    assert (calibration.work.arrival_seconds, calibration.work.usable_slots) == (0.01, 0.9)
    assert calibration.work.lengths.groups.tolist() == lengths.groups.tolist()
    assert calibration.work.lengths.is_course


def test_a_damaged_calibration_counts_as_missing():
    path = cache.store_calibration(MEASURED)
    for text in ("", "{}", "[]", '{"format": 9}', path.read_text()[:-20]):
        path.write_text(text)
        assert cache.cached_calibration(MEASURED.config) is None


# ---- sweeps --------------------------------------------------------------------------------------------------------


def test_a_sweep_predicts_all_combinations_and_marks_the_best(tmp_path):
    done = []
    points = sweep(
        MEASURED,
        MEASURED.config,
        parse_grid(["placement.actors=1,2", "schedule.max_lag=1,4"]),
        on_progress=lambda count, total: done.append((count, total)),
    )
    assert done == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert [point.overrides for point in points][1] == ("placement.actors=1", "schedule.max_lag=4")
    for point in points:
        if point.prediction is not None:
            assert point.prediction == predict(MEASURED, override_config(MEASURED.config, point.overrides))
    best = best_of(points)
    assert best.prediction.steps_per_second >= 0.99 * max(
        point.prediction.steps_per_second for point in points if point.prediction
    )
    text = sweep_lines(points)
    assert len(text) == 5
    assert sum("<- best" in line for line in text) == 1
    assert sweep_document(points)["best"] == list(best.overrides)
    drawn = ElementTree.fromstring(sweep_figure(points))
    assert len(drawn.findall("{http://www.w3.org/2000/svg}path")) == 2


def test_a_combination_that_is_not_valid_has_its_error_in_the_table():
    points = sweep(MEASURED, MEASURED.config, [("placement.actors", ["1", "0"])])
    assert points[0].prediction is not None
    assert "placement.actors" in points[1].error
    assert "not possible: placement.actors" in sweep_lines(points)[2]


def test_a_sweep_without_a_valid_combination_is_refused():
    with pytest.raises(ConfigError, match=r"no combination is possible; the first: placement.actors"):
        sweep(MEASURED, MEASURED.config, [("placement.actors", ["0", "-1"])])


@pytest.mark.parametrize("text", ["placement.actors", "placement.actors=", "=1,2"])
def test_a_sweep_needs_a_key_and_values(text):
    with pytest.raises(ConfigError, match=r"write section\.key=1,2,4|no combination"):
        sweep(MEASURED, MEASURED.config, parse_grid([text]))


def test_a_sweep_is_limited():
    values = ",".join(map(str, range(1, 30)))
    with pytest.raises(ConfigError, match="841 combinations are more than 500"):
        parse_grid([f"placement.actors={values}", f"schedule.max_lag={values}"])


# ---- bad input -----------------------------------------------------------------------------------------------------


def test_gpus_that_do_not_generate_train():
    assert on_gpus(override_config(PRESET, ["placement.actors=10"]), 16).trainer.ranks == 6
    assert on_gpus(PRESET, 16, {"trainer.ranks"}) == PRESET
    with pytest.raises(ConfigError, match=r"placement.actors=8 generate on 8 of 8 GPUs, so none trains"):
        on_gpus(PRESET, 8)
    with pytest.raises(ConfigError, match=r"8 of 14 GPUs, and trainer\.ranks=8 need more"):
        on_gpus(PRESET, 14, {"trainer.ranks"})


def test_a_shared_gpu_generates_and_trains():
    shared = load_config("dapo-1.5b-1gpu")
    assert on_gpus(shared, 1) == shared


def test_the_cache_of_the_table_holds_sequences_of_the_longest_completion_in_both_engines():
    predicted = [
        document(Table(Lengths.of([1000])), override_config(PRESET, changes))["predicted"]["steps_per_second"]
        for changes in (["placement.actors=6"], ["placement.actors=6", "eval.max_tokens=32000"])
    ]
    assert predicted[1] == pytest.approx(predicted[0], rel=0.05)
    embedded = load_config("quickstart", ["placement.gpu=H100", "model.device=cuda"])
    assert document(Table(), embedded)["predicted"]["steps_per_second"] > 0


def test_more_ranks_train_faster_and_another_model_is_named():
    config = build_config(SMALL)
    twice = override_config(config, ["trainer.ranks=2"])
    assert 2 * MEASURED.speeds_of(twice).train_seconds(2000) == pytest.approx(
        MEASURED.speeds_of(config).train_seconds(2000)
    )
    assert not any("model.path" in line for line in MEASURED.warnings_of(twice))
    other = override_config(config, ["model.path=another", "learner.lora_rank=4"])
    assert any(line.startswith("model.path, learner.lora_rank, which") for line in MEASURED.warnings_of(other))


def test_no_split_of_the_preset_within_hosts_is_much_faster():
    speeds = [
        document(Table(), on_gpus(override_config(PRESET, [f"placement.actors={actors}"]), 16))["predicted"]
        for actors in (PRESET.placement.actors, 4, 12)
    ]
    rates = [speed["steps_per_second"] for speed in speeds]
    assert rates[0] >= 0.95 * max(rates)
    assert PRESET.placement.actors + PRESET.trainer.ranks == 16


def test_a_model_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"trainer: weights .* it may use 24.2 GB of A10"):
        document(Table(), override_config(PRESET, ["placement.gpu=A10", "trainer.ranks=4"]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "none, or one below 1"),
        ("[0]", "one below 1"),
        ('{"a": 1}', "not a JSON list"),
        ("{", "not a JSON list"),
    ],
)
def test_lengths_that_are_none_are_refused(tmp_path, text, message):
    (tmp_path / "lengths.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_lengths(str(tmp_path / "lengths.json"), 100)


def test_lengths_are_a_mean_or_a_histogram(tmp_path):
    assert read_lengths("50", 1000).mean == pytest.approx(50)
    (tmp_path / "lengths.json").write_text('{"10": 3, "20": 1}')
    assert read_lengths(str(tmp_path / "lengths.json"), 100).mean == 12.5
    for text in ("0.5", "101", "no.json"):
        with pytest.raises(ConfigError, match="--lengths"):
            read_lengths(text, 100)


def test_longer_completions_are_cut_at_the_limit():
    twice = Lengths.of([2, 30]).scaled(2, 50)
    assert (twice.mean, twice.longest) == (27, 50)
    with pytest.raises(ConfigError, match="the factor must be a number above 0"):
        twice.scaled(0, 50)
