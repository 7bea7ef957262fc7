"""The page: self-contained, well-formed, honest about what it shows."""

import dataclasses
import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from pipelinerl.flows.cli.training import summary
from pipelinerl_core.prompts.sums import total
from pipelinerl_core.report import charts, figures
from pipelinerl_core.report.facts import collect
from pipelinerl_core.report.html import duration, write_report
from pipelinerl_core.run.records import (
    REPORT_HTML_KEY,
    REPORT_JSON_KEY,
    RUN_KEY,
    WEIGHTS_TABLE_KEY,
    EvalRecord,
    commit_key,
    eval_key,
)
from pipelinerl_core.types import TurnSpan
from tests.builders import run_record
from tests.fakes import MemoryStore
from tests.synthetic_run import (
    Shape,
    decode,
    make_commit,
    make_rollout,
    put_batch,
    put_record,
    render_report,
    training_row,
    write_run,
)

_VOID = {"meta", "br", "link"}


class Balance(HTMLParser):
    """Fails on a tag that is closed out of order."""

    def __init__(self):
        super().__init__()
        self.open = []
        self.attributes = set()

    def handle_starttag(self, tag, attrs):
        self.attributes |= {name for name, _ in attrs}
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def page():
    store = MemoryStore()
    write_run(store, Shape(steps=30), crash_at=9)
    return render_report(store, decode=decode)


def test_nothing_comes_from_outside(page):
    assert "http://" not in page
    assert "https://" not in page
    assert not re.search(r"@import|url\(|<script|<link|<img|<iframe", page)
    parser = Balance()
    parser.feed(page)
    assert not parser.attributes & {"src", "href", "onclick", "onload"}


def test_tags_are_balanced(page):
    parser = Balance()
    parser.feed(page)
    assert parser.open == []


def test_every_chart_is_valid_xml_inside_its_view_box(page):
    svg_texts = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(svg_texts) == 10
    for text in svg_texts:
        root = ElementTree.fromstring(text)
        width, height = map(float, root.get("viewBox").split()[2:])
        for mark in root.iter("rect"):
            assert 0 <= float(mark.get("x")) <= float(mark.get("x")) + float(mark.get("width")) <= width + 2.1
            assert 0 <= float(mark.get("y")) <= float(mark.get("y")) + float(mark.get("height")) <= height
        for mark in root.iter("circle"):
            assert 0 <= float(mark.get("cx")) <= width
            assert 0 <= float(mark.get("cy")) <= height
        assert "nan" not in text


def test_a_higher_value_is_drawn_higher_and_later_is_further_right():
    series = [charts.Series("r", [(0.0, 0.0), (10.0, 1.0)], "train")]
    text = charts.line_chart("t", series, charts.Axis("x"), charts.Axis("y"))
    (x0, y0), (x1, y1) = re.findall(r"([\d.]+) ([\d.]+)", re.search(r' d="M(.*?)"', text).group(1))
    assert float(x1) > float(x0)
    assert float(y1) < float(y0)


def test_ticks_are_round_numbers():
    assert charts.nice_ticks(0, 1, 5) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert charts.nice_ticks(-0.5, 3.5, 6) == [0, 1, 2, 3]
    assert charts.nice_ticks(3, 3) == [3]


def test_tokens_carry_the_version_that_sampled_them_and_masked_ones_are_struck_out(store):
    put_record(store, RUN_KEY, run_record())
    rollout = make_rollout(spans=[(7, 0, 3), (8, 3, 6)], prompt="3+4=", completion="12345")
    rows = [training_row(rollout, oldest_version=8)]
    put_record(store, commit_key(9, 2), make_commit(9).model_copy(update={"batches": put_batch(store, 9, 2, rows)}))
    page = render_report(store, decode=decode)
    assert '<span class="v1 stale" title="version 7">123</span>' in page
    assert '<span class="v2" title="version 8">45&lt;end&gt;</span>' in page
    assert '<span class="prompt">3+4=</span>' in page
    without = render_report(store)
    assert '<span class="v1 stale" title="version 7">1 2 3 </span>' in without


def test_tokens_that_an_environment_has_given_are_grey(store):
    put_record(store, RUN_KEY, run_record())
    made = make_rollout(spans=[(7, 0, 6)], prompt="3+4=", completion="12345")
    is_sampled = np.array([True, True, False, False, True, True])
    turns = {"turn_spans": (TurnSpan(0, 2), TurnSpan(4, 6)), "turn_rewards": (0.25, 0.75), "branch_starts": (2,)}
    rows = [training_row(replace(made, loss_mask=is_sampled, task='{"level": 3}', **turns))]
    put_record(store, commit_key(9, 2), make_commit(9).model_copy(update={"batches": put_batch(store, 9, 2, rows)}))
    page = render_report(store, decode=decode)
    assert (
        '<p class="meta">task: level 3</p><p class="part">prompt</p><pre><span class="prompt">3+4=</span></pre>'
        '<p class="part">turn 0, reward 0.25</p><pre><span class="v1" title="version 7">12</span></pre>'
        '<p class="part">turn 1, the first of a branch, reward 0.75</p>'
        '<pre><span class="prompt" title="given by the environment">34</span>'
        '<span class="v1" title="version 7">5&lt;end&gt;</span></pre>'
    ) in page


def test_an_episode_of_an_evaluation_shows_its_task_and_its_turns(store):
    put_record(store, RUN_KEY, run_record())
    turns = [{"given": "", "text": "go", "reward": 0.5}, {"given": "a wall", "text": "left", "reward": None}]
    sample = {"prompt": "a maze", "completion": "goa wallleft", "reward": 1.0, "reference": "", "task": {"size": 3}}
    record = EvalRecord(
        version=0, num_prompts=1, accuracy=0, mean_tokens=1, errors=0, seconds=1, samples=(sample | {"turns": turns},)
    )
    put_record(store, eval_key(0), record)
    page = render_report(store)
    assert '<p class="meta">task: size 3</p>' in page
    assert '<p class="part">turn 0, reward 0.5</p><pre>go</pre><p class="part">turn 1</p><pre><span class=' in page
    assert ">a wall</span>left</pre>" in page


def test_text_of_the_model_cannot_become_markup_and_the_page_shows_no_secret(store):
    config = {"tracking": {"mlflow_uri": "postgresql://u:hunter2@h/db"}, "hub": {"token": "hunter2"}}
    put_record(store, RUN_KEY, run_record(run_id="<b>r</b>", config=config))
    sample = {"prompt": "<script>1</script>", "completion": "</pre>\x1b$css", "reward": 0, "reference": "<i>7</i>"}
    record = EvalRecord(version=0, num_prompts=1, accuracy=0, mean_tokens=1, errors=0, seconds=1, samples=(sample,))
    put_record(store, eval_key(0), record)
    page = render_report(store)
    assert "<script>" not in page
    assert "&lt;/pre&gt;\\u001b$css" in page
    assert "reference: &lt;i&gt;7&lt;/i&gt;" in page
    assert "<b>r</b>" not in page
    assert "hunter2" not in page
    parser = Balance()
    parser.feed(page)
    assert parser.open == []


def test_the_ledger_says_how_long_the_completions_of_each_class_were(page):
    tables = re.findall(r'<table class="ledger">.*?</table>', page, re.DOTALL)
    rows = [re.sub(r"<[^>]+>", " ", row).split() for table in tables for row in table.split("<tr>")]
    assert next(row for row in rows if row[:1] == ["trained"])[2:].count("&ndash;") == 0
    assert next(row for row in rows if row[:1] == ["in_flight"])[-3:] == ["&ndash;"] * 3, "no length yet"
    assert "The classes account for every generated token. Trained over generated mean length: 1.00." in page


def test_before_and_after_are_both_shown(page):
    assert "Before: the first groups of step 1<" in page
    assert "After: the first groups of step 30<" in page
    assert "Version 0: 0.120" in page
    assert "Version 30: 0.870" in page


def test_improved_prompts_are_shown_first_with_at_least_one_other_and_the_page_counts_both(store):
    write_run(store, Shape(steps=3))
    before, after = [0, 0, 0, 0, 0, 1], [1, 1, 1, 1, 0, 0]
    for version, rewards in ((0, before), (3, after)):
        record = EvalRecord.model_validate_json(store.get(eval_key(version)))
        samples = [{"prompt": f"p{at}", "completion": "c", "reward": reward} for at, reward in enumerate(rewards)]
        put_record(store, eval_key(version), record.model_copy(update={"samples": tuple(samples)}))
    page = render_report(store, decode=decode)
    shown = re.findall(r'<span class="prompt">(p\d)</span>', page)
    assert shown == ["p0", "p1", "p5", "p4"] * 2
    assert [page.count(f"({note})</p>") for note in ("rose", "fell", "unchanged")] == [4, 2, 2]
    assert "of 6 recorded prompts the reward of 4 rose and of 1 fell." in page
    assert page.index("Roles over time") < page.index("Reward against wall clock")


def test_prompts_that_differ_between_two_evaluations_have_no_label(store):
    write_run(store, Shape(steps=3))
    shown = {0: [("x", 1), ("a", 1), ("b", 0)], 3: [("y", 0), ("a", 0), ("b", 1)]}
    for version, prompts in shown.items():
        record = EvalRecord.model_validate_json(store.get(eval_key(version)))
        samples = [{"prompt": prompt, "completion": "c", "reward": reward} for prompt, reward in prompts]
        put_record(store, eval_key(version), record.model_copy(update={"samples": tuple(samples)}))
    page = render_report(store, decode=decode)
    labels = re.findall(r"\((rose|fell)\)</p>.*?<span class=.prompt.>(.)</span>", page)
    assert labels == [("rose", "b"), ("fell", "a")] * 2


def test_write_report_writes_the_three_objects_and_they_agree(store):
    write_run(store, Shape(steps=3))
    report = write_report(store, decode=decode)
    assert json.loads(store.get(REPORT_JSON_KEY)) == report
    assert store.exists(WEIGHTS_TABLE_KEY)
    assert f"{report['samples']:,} rollouts" in store.get(REPORT_HTML_KEY).decode()


def test_durations_read_well():
    assert [duration(seconds) for seconds in (7.31, 252.3, 7384.0)] == ["7.3 s", "4 min 12 s", "2 h 03 min"]


def test_thinning_keeps_the_longest_pause():
    points = [(float(index), 1.0) for index in range(5000)]
    points[1234] = (1234.0, 99.0)
    thinned = figures._worst(points)
    assert len(thinned) <= 400
    assert (1234.0, 99.0) in thinned


def test_a_run_of_equal_rewards_begins_with_that_and_shows_a_completion_beside_its_reference():
    store = MemoryStore()
    write_run(store, Shape(steps=6, reward=0.0))
    report = write_report(store, decode=decode)
    assert report["advice"].startswith(
        "All rewards were equal (0.000): nothing was learned. reward.kind=sums: 1 if the text"
    )
    assert report["equal_reward_example"]["reference"] == str(total(report["equal_reward_example"]["prompt"]))
    assert "reward.kind=last_number scores" in report["equal_reward_example"]["other rewards"]
    page = store.get(REPORT_HTML_KEY).decode()
    assert page.index("nothing was learned") < page.index(">reference<") < page.index('class="tiles"')
    lines = summary(report, "report.html")
    assert lines[1] == "  All rewards were equal (0.000): nothing was learned."
    assert lines[2].startswith("    reward.kind=sums: 1 if the text")
    assert [line.split()[0] for line in lines[3:6]] == ["prompt", "completion", "reference"]
    bottleneck = next(line for line in lines if line.startswith("  bottleneck"))
    assert "equal" not in bottleneck


def test_a_report_on_a_host_without_the_prompts_shows_the_reference_all_the_same():
    store = MemoryStore()
    run = write_run(store, Shape(steps=2, reward=1.0))
    config = {**run.config, "prompts": {"kind": "file", "path": "/nowhere.jsonl"}}
    put_record(store, RUN_KEY, run.model_copy(update={"config": config}))
    example = write_report(store, decode=decode)["equal_reward_example"]
    assert example["prompt"].endswith("=")
    assert example["reference"] == str(total(example["prompt"]))


def test_equal_rewards_teach_nothing_only_without_another_term_of_the_loss_and_after_some_steps():
    store = MemoryStore()
    run = write_run(store, Shape(steps=2, reward=0.0))
    assert write_report(store, decode=decode)["equal_reward"] == 0.0
    goes_on = {**run.config, "trainer": {**run.config["trainer"], "steps": 9}}
    teacher = {**run.config, "loss": {**run.config["loss"], "teacher": "builtin:sums"}}
    custom = {**run.config, "loss": {**run.config["loss"], "advantage": "turn"}}
    overlong = {**run.config, "reward": {**run.config["reward"], "overlong_tokens": 2}}
    for config in (goes_on, teacher, custom, overlong):
        put_record(store, RUN_KEY, run.model_copy(update={"config": config}))
        assert write_report(store, decode=decode)["equal_reward"] is None


def test_an_evaluation_whose_completions_all_failed_is_no_accuracy_of_0():
    store = MemoryStore()
    write_run(store, Shape(steps=4))
    record = EvalRecord.model_validate_json(store.get(store.list("evals")[-1]))
    failed = {"version": 4, "accuracy": 0.0, "low": None, "high": None, "errors": 8}
    put_record(store, eval_key(4), record.model_copy(update=failed))
    report = write_report(store, decode=decode)
    assert report["eval_last"] is None
    assert "nothing" not in store.get(REPORT_HTML_KEY).decode()[:100]
    facts = collect(store)
    assert all(record.version != 4 for record, _ in figures._accuracies(facts.evals.values()))


def test_figures_of_a_run_whose_rows_are_not_kept_are_those_of_all_steps():
    store = MemoryStore()
    run = write_run(store, Shape(steps=8))
    whole = write_report(store, decode=decode)
    config = {**run.config, "store": {**run.config["store"], "keep_rows": 2}}
    put_record(store, RUN_KEY, run.model_copy(update={"config": config}))
    store.delete([key for key in store.list("batches") if int(key.split("/")[1].split(".")[0]) <= 6])
    report = write_report(store, decode=decode)
    assert report["steps_with_rows"] == 2
    for name in ("samples", "rollouts_per_second", "reward_first", "reward_last"):
        assert report[name] == pytest.approx(whole[name]), name
    assert "those of the 2 steps whose rows are kept" in store.get(REPORT_HTML_KEY).decode()


def test_different_rewards_in_one_step_are_not_equal_rewards():
    store = MemoryStore()
    write_run(store)
    report = write_report(store, decode=decode)
    assert (report["equal_reward"], report["equal_reward_example"]) == (None, None)


def test_the_reward_curve_has_a_gap_where_the_run_was_down():
    store = MemoryStore()
    write_run(store, Shape(steps=6))
    facts = collect(store)
    assert figures.reward_over_time(facts).count('class="line train"') == 1
    commits = dict(facts.commits)
    for step in (4, 5, 6):
        commit = commits[step]
        later = {name: getattr(commit, name) + 500 for name in ("reserved_at", "computed_at", "committed_at")}
        actors = {"actor-0/9": commit.actors["actor-0/1"]}
        commits[step] = commit.model_copy(update={**later, "epoch": 8, "actors": actors})
    facts = dataclasses.replace(facts, commits=commits)
    assert figures.reward_over_time(facts).count('class="line train"') == 2
    assert figures.reward_over_samples(facts).count('class="line train"') == 1


def test_without_a_reported_swap_the_tile_does_not_show_a_median():
    store = MemoryStore()
    write_run(store, Shape(steps=1))
    page = render_report(store, decode=decode)
    assert "no swap was reported before the last step" in page
    assert "median of 0 swaps" not in page


def test_summary_and_report_contain_the_command_that_opens_mlflow():
    store = MemoryStore()
    run = write_run(store, Shape(steps=2))
    for uri, shown in (
        ("sqlite:////my runs/mlflow.db", "mlflow ui --backend-store-uri 'sqlite:////my runs/mlflow.db'"),
        ("https://user:secret@mlflow.example", "mlflow.example"),
    ):
        put_record(store, RUN_KEY, run.model_copy(update={"mlflow_uri": uri, "mlflow_run_id": "ab12"}))
        report = write_report(store, decode=decode)
        assert shown in report["mlflow"]
        assert any(line.startswith("  MLflow  ") and line.endswith(report["mlflow"]) for line in summary(report, "r"))
        page = store.get(REPORT_HTML_KEY).decode()
        assert "ab12" in page
        assert "secret" not in page
        assert re.search(r'<span>MLflow <b>(mlflow ui|<a href="https://[^"]*mlflow.example">)', page)


def test_evaluations_are_a_table_and_a_curve_with_intervals(store):
    write_run(store, Shape(steps=4))
    values = {"num_prompts": 50, "mean_tokens": 4.0, "errors": 0, "seconds": 1.0}
    further = {"low": 0.4, "high": 0.6, "components": {"<right>": 0.75}}
    put_record(store, eval_key(2), EvalRecord(version=2, accuracy=0.5, newest_step=4, **further, **values))
    hard = EvalRecord(version=2, last_version=3, set="hard", temperature=0.6, top_p=0.9, accuracy=0.1, **values)
    put_record(store, eval_key(2, "hard"), hard)
    write_report(store)
    page = store.get(REPORT_HTML_KEY).decode()
    rows = [re.sub(r"<[^>]+>", "|", row) for row in page.split("<tr>")]
    assert any(row.startswith("|held-out: 50||1||2||0.500||0.400 to 0.600||0.750||4.0||1.0||2|") for row in rows)
    assert any(row.startswith("|hard: 50||0.6, top_p 0.9||2 to 3||0.100||||||4.0||1.0||0|") for row in rows)
    assert "&lt;right&gt;" in page
    assert 'aria-label="Accuracy by version"' in page
    assert "best" not in re.search(r"<th>prompts</th>.*?</tr>", page).group(0), "no evaluation has this figure"
    report = json.loads(store.get(REPORT_JSON_KEY))
    assert [(entry["set"], entry["version"], entry["lag"]) for entry in report["evaluations"]] == [
        ("", 0, 0), ("", 2, 2), ("", 4, 0), ("hard", 2, 0),
    ]  # fmt: skip
