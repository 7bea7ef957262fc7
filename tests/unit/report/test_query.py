"""SQL over a run: every row once with its text, only what a statement names is read, and errors are one line."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from tokenizers import Tokenizer
from tokenizers import models as models_of_tokenizers

import pipelinerl
from pipelinerl_core.errors import BrokenRecord, ConfigError, MissingObject
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.report.query.database import Database, stores_of
from pipelinerl_core.report.query.output import csv_parts, document, table_lines
from pipelinerl_core.report.query.reader import RunReader
from pipelinerl_core.report.query.text import Texts
from pipelinerl_core.report.query.views import VIEWS
from pipelinerl_core.run.records import batch_key
from pipelinerl_core.storage.object_store import open_store
from tests.builders import put_commit, put_epoch, put_run
from tests.counting_store import CountingStore
from tests.fakes import MemoryStore
from tests.unit.report.query_case import FILTERED, GROUPS, OPEN, SIZE, STEPS, TRAINED, rollouts_of, write_query_run

PAGE = Path(__file__).parents[3] / "docs" / "sql.md"
QUERIES = re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def tokenizer(prepared_model):
    return Tokenizer.from_file(str(prepared_model / "tokenizer.json"))


@pytest.fixture(scope="module")
def url(tokenizer, tmp_path_factory):
    """The run in a directory."""
    store = open_store(str(tmp_path_factory.mktemp("root") / "r-1"))
    with pytest.MonkeyPatch.context() as patch:
        write_query_run(store, tokenizer, patch)
    return store.url


@pytest.fixture(scope="module")
def database(url):
    with Database(stores_of(url)) as opened:
        yield opened


def rows(database, statement):
    return database.table(statement).to_pylist()


def test_every_row_is_there_once_with_its_fate(database):
    counts = rows(database, "select fate, count(*) as n, count(advantage) as a from rollouts group by fate")
    assert sorted((row["fate"] or "", row["n"], row["a"]) for row in counts) == [
        ("", SIZE, 0), ("filtered", SIZE, 0), ("trained", TRAINED, TRAINED),
    ]  # fmt: skip
    keys = rows(database, "select step, group_id, rollout_index, attempt, fate from rollouts")
    assert len({(row["group_id"], row["rollout_index"]) for row in keys}) == len(keys) == TRAINED + 2 * SIZE
    assert {row["group_id"] for row in keys if row["step"] is None} == {OPEN}
    assert {row["step"] for row in keys if row["group_id"] == FILTERED} == {20}
    assert {row["attempt"] for row in keys if row["group_id"] == 95} == {1}  # not of the replaced lease
    assert {row["step"]: 0 for row in keys if row["fate"] == "trained"}.keys() == set(range(1, STEPS + 1))


def test_rows_have_text_task_components_and_versions(database, tokenizer):
    (row,) = rows(database, "select * from rollouts where group_id = 50 and rollout_index = 2")
    sampled = rollouts_of(tokenizer, 13, 50)[2]
    assert (row["prompt"], row["completion"]) == ("1+2=", "7,12,20.20<eos>")
    assert json.loads(row["task"]) == {"level": 2, "answer": "50", "terms": 2}
    assert dict(row["components"]) == {"correct": 0.0, "format": 1.0}
    assert (row["step"], row["first_version"], row["last_version"], row["lag"]) == (13, 11, 12, 1)
    assert row["num_tokens"] == len(sampled.completion_token_ids)
    assert row["num_trained_tokens"] == row["num_tokens"] - row["num_tokens"] // 2  # version 11 is masked
    assert row["mean_logprob"] == pytest.approx(float(sampled.rollout_logprobs.mean()))


def test_tokens_are_those_of_the_rows(database, tokenizer):
    tokens = rows(database, "select * from tokens where group_id = 50 and rollout_index = 2 order by position")
    sampled = rollouts_of(tokenizer, 13, 50)[2]
    num = len(sampled.completion_token_ids)
    assert [row["position"] for row in tokens] == list(range(num))
    assert [row["token_id"] for row in tokens] == sampled.completion_token_ids.tolist()
    assert [row["logprob"] for row in tokens] == sampled.rollout_logprobs.tolist()
    assert [row["version"] for row in tokens] == [11] * (num // 2) + [12] * (num - num // 2)
    assert "".join(row["text"] for row in tokens) == "7,12,20.20<eos>"
    assert [row["trained"] for row in tokens] == [row["version"] == 12 for row in tokens]
    assert {row["advantage"] for row in tokens if not row["trained"]} == {None}
    assert {row["advantage"] for row in tokens if row["trained"]} == {-0.25}
    (count,) = rows(database, "select count(*) as n, (select sum(num_tokens) from rollouts) as total from tokens")
    assert count["n"] == count["total"]


def test_turns_have_their_texts_and_rewards(database):
    first, second = rows(database, "select * from turns where group_id = 80 and rollout_index = 0 order by turn")
    assert [first["given"], first["text"], first["reward"]] == ["", "12", 0.25]
    assert [second["given"], second["text"], second["reward"]] == [".", "12<eos>", 0.75]
    tokens = rows(
        database, "select turn, sampled from tokens where group_id = 80 and rollout_index = 0 order by position"
    )
    assert [row["turn"] for row in tokens] == [0, 0, 0, 1, 1, 1]
    assert [row["sampled"] for row in tokens] == [True, True, False, True, True, True]
    (whole,) = rows(database, "select * from turns where group_id = 81 and rollout_index = 0")
    assert (whole["turn"], whole["text"], whole["reward"]) == (0, "12.12<eos>", None)


def test_the_other_views_have_the_records(database):
    (group,) = rows(database, "select * from groups where group_id = 50")
    assert (group["num_rollouts"], group["mean_reward"], group["max_reward"], group["fate"]) == (
        4,
        0.5,
        1.0,
        "trained",
    )
    assert rows(database, "select count(*) as n from groups")[0]["n"] == STEPS * GROUPS + 2
    (step,) = rows(database, "select metrics['policy/entropy'] as entropy, seconds from steps where step = 9")
    assert (step["entropy"], step["seconds"]) == (0.1, pytest.approx(0.8))
    assert rows(database, "select value from metrics where step = 9 and name = 'policy/entropy'")[0]["value"] == 0.1
    assert rows(database, "select count(*) as n from versions")[0]["n"] == STEPS + 1
    assert rows(database, "select count(*) as n from swaps where actor = 'actor-1'")[0]["n"] == STEPS
    assert rows(database, "select version, set from evaluations")[1] == {"version": STEPS, "set": ""}
    (run,) = rows(database, "select run_id, step, problem from runs")
    assert run == {"run_id": "synthetic", "step": STEPS, "problem": ""}


@pytest.mark.parametrize("query", QUERIES, ids=range(len(QUERIES)))
def test_a_query_of_the_page_has_an_answer(database, query):
    table = database.table(query)
    assert table.num_rows > 0
    assert any(column.null_count < len(column) for column in table.columns)


def answers(database, title):
    (query,) = re.findall(rf"{re.escape(title)}\n\n```sql\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return rows(database, query)


def test_the_page_has_twenty_questions_that_find_injected_faults(database):
    assert PAGE.read_text().count("\n### ") >= 20
    failing = answers(database, "### Which prompts always fail?")
    assert [row["prompt_id"] for row in failing] == ["9+9+9="]
    (hacked,) = answers(
        database, "Very short completions with a high reward, by a column of the task (the end token counts):"
    )
    assert (hacked["level"], hacked["rollouts"]) == ("2", STEPS)
    copies = answers(database, "Completions that copy the prompt:")
    assert {row["copies"] for row in copies} == {GROUPS}
    actors = answers(database, "### Does an actor sample from other weights than it says?")
    assert (actors[0]["actor"], actors[0]["alarm"]) == ("actor-1", "other weights")
    shares = answers(database, "the ratio counts as 1 if it is not stored:")
    assert (shares[0]["rollout_index"], sum(row["share"] for row in shares) > 0.5) == (0, True)
    far = answers(database, "With `store.trainer_logprobs=true`:")
    assert {(row["rollout_index"], row["position"]) for row in far} == {(3, 0)}
    assert far[0]["ratio"] == pytest.approx(4, rel=1e-5)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("select * from rolouts", "SQL: there is no view rolouts; did you mean rollouts?"),
        ("select * from a_table", "SQL: there is no view a_table; the views are runs, steps, "),
        ("select level from rollouts", "A column of the prompt's row is task->>'level'"),
    ],
)
def test_an_error_names_the_views_and_the_columns_of_the_row(database, statement, message):
    with pytest.raises(ConfigError) as error:
        database.table(statement)
    assert message in str(error.value)
    assert "pg_" not in str(error.value)


def test_a_statement_reads_only_the_objects_of_the_views_that_it_names(url, monkeypatch):
    store, source = CountingStore(MemoryStore()), open_store(url)
    for key in source.list(""):
        store.put(key, source.get(key))
    with Database([store]) as opened:
        everything = opened.table("select * from tokens order by all").num_rows
        store.requests.clear()
        assert opened.table("select 1 as x").to_pylist() == [{"x": 1}]
        assert not store.requests
        opened.table("select * from swaps")
        assert {name for name in store.requests if name.startswith("get")} <= {
            "get epochs",
            "get commits",
            "get compacted",
        }
        assert "list rollouts" not in store.requests
    with Database([source]) as opened:  # the same rows through the files of the directory
        assert opened.table("select * from tokens order by all").num_rows == everything


@pytest.mark.parametrize(
    ("statement", "error"),
    [
        ("select x from rollouts", 'Referenced column "x" not found'),
        ("selec 1", "syntax error at or near"),
        ("select 1; select 2", "give one statement at a time"),
        ("select * from rollout", "there is no view rollout; did you mean rollouts"),
        ("select cast(completion as int) from rollouts", "Could not convert string"),
        ("select * from read_csv('/etc/passwd')", "file system operations are disabled"),
        ("copy (select 1) to 'written.csv'", "file system operations are disabled"),
        ("attach 'written.db'", "file system operations are disabled"),
        ("set memory_limit = '9GB'", "the configuration has been locked"),
    ],
)
def test_an_error_in_a_statement_is_a_config_error(database, statement, error):
    with pytest.raises(ConfigError, match=re.escape(error)):
        database.table(statement)


def test_damaged_and_missing_objects_are_errors_and_no_empty_answer(url, tmp_path):
    store, source = open_store(str(tmp_path / "r-2")), open_store(url)
    for key in source.list(""):
        store.put(key, source.get(key))
    key = batch_key(STEPS, 2, 0)
    store.put(key, source.get(key)[:200])
    with Database([store]) as opened:
        assert opened.table("select count(*) from steps").num_rows == 1
        with pytest.raises(BrokenRecord, match=key):
            opened.table("select count(advantage) from rollouts")
        store.delete([key])
        with pytest.raises(MissingObject, match=f"{key} is not in"):
            opened.table("select count(*) from rollouts")


def test_a_root_has_all_runs(url):
    root = url.rpartition("/")[0]
    second = open_store(f"{root}/r-2")
    put_run(second, load_config("quickstart"), run_id="other")
    put_epoch(second, 1)
    put_commit(second, 0)
    with Database(stores_of(f"{root}/")) as opened:
        assert rows(opened, "select run_id, max(step) as step from steps group by run_id order by run_id") == [
            {"run_id": "other", "step": 0}, {"run_id": "synthetic", "step": STEPS},
        ]  # fmt: skip
        assert opened.table("select * from runs").num_rows == 2
        texts = rows(opened, "select completion from rollouts where group_id = 50 order by rollout_index")
        assert [row["completion"] for row in texts] == ["12.12<eos>", "<eos>", "7,12,20.20<eos>", "1+2<eos>"]
    put_run(second, load_config("quickstart"), run_id="synthetic")
    with Database(stores_of(f"{root}/")) as opened, pytest.raises(ConfigError, match="several runs of the root"):
        opened.table("select count(*) from rollouts")
    with pytest.raises(ConfigError, match="no run at"):
        stores_of(f"{root}/nothing")


def test_python_gives_a_table(url):
    table = pipelinerl.open_run(url).sql("select step, avg(reward) as reward from rollouts group by step")
    assert isinstance(table, pa.Table)
    assert table.column_names == ["step", "reward"]
    assert table.num_rows == STEPS + 1


def test_results_are_lines_csv_and_json(database):
    statement = (
        "select group_id, completion, components, 1.5 as x, null as y from rollouts where step = 3 order by all"
    )
    lines = table_lines(database.sql(statement), 2)
    assert lines[0].split() == ["group_id", "completion", "components", "x", "y"]
    assert lines[-1] == "16 rows, of which 2 are shown (--limit)"
    assert len(lines) == 4
    parts = "".join(csv_parts(database.sql(statement))).splitlines()
    assert parts[0] == "group_id,completion,components,x,y"
    assert len(parts) == 17
    values = document(
        database.sql("select reward, components, 'a\x1b[31m' as s from rollouts where group_id = 50"), 1
    )
    assert values["num_rows"] == 4
    assert values["rows"] == [{"reward": 1.0, "components": {"correct": 1.0, "format": 1.0}, "s": "a\x1b[31m"}]
    (_, hostile, _) = table_lines(database.sql("select 'a\x1b[31m\nb' as s"), 0)
    assert hostile == r"a\x1b[31m\nb"


def test_texts_of_several_runs_are_decoded_by_the_tokenizer_of_each(tmp_path):
    models = {}
    for name, words in (("a", "xy"), ("b", "zw")):
        tokenizer = Tokenizer(
            models_of_tokenizers.WordLevel({word: at for at, word in enumerate(words)}, unk_token="x")
        )
        (tmp_path / name).mkdir()
        tokenizer.save(str(tmp_path / name / "tokenizer.json"))
        models[name] = str(tmp_path / name)
    texts = Texts(models.__getitem__)
    runs = pa.chunked_array([["a", "b"], ["a"]])
    assert texts.token_text(runs, pa.chunked_array([[0, 1], [1]])).to_pylist() == ["x", "w", "y"]
    lists = pa.chunked_array([pa.array([[1], [0, 1]]), pa.array([[]], pa.list_(pa.int64()))])
    assert texts.decoded(runs, lists).to_pylist() == ["y", "z w", ""]
    (tmp_path / "c").mkdir()
    with pytest.raises(ConfigError, match="without a tokenizer"):
        Texts(lambda _: str(tmp_path / "c")).decoded(runs, lists)


def test_ids_beyond_a_vocabulary_with_gaps_have_no_text(tmp_path):
    vocabulary = {"x": 0, "y": 5}
    Tokenizer(models_of_tokenizers.WordLevel(vocabulary, unk_token="x")).save(str(tmp_path / "tokenizer.json"))
    texts, runs = Texts(lambda _: str(tmp_path)), pa.chunked_array([["a", "a", "a"]])
    assert texts.token_text(runs, pa.chunked_array([[5, 3, 151_700]])).to_pylist() == ["y", "", ""]


def test_views_and_sources_are_the_same_names():
    records = {name for name, view in VIEWS.items() if not view.source}
    assert all(callable(getattr(RunReader, name)) for name in records)
    assert all(
        column.meaning.endswith(".") or "](" in column.meaning
        for v in VIEWS.values()
        for column in v.columns.values()
    )


def test_without_duckdb_the_message_names_the_extra(url, monkeypatch):
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(ConfigError, match=re.escape("pip install 'pipelinerl[sql]'")):
        Database(stores_of(url))


def test_the_command_prints_one_line_for_an_error_and_answers_statements_of_stdin(url):
    def run(*arguments, text=""):
        command = [sys.executable, "-m", "pipelinerl.flows.cli", "sql", url, *arguments]
        return subprocess.run(command, input=text, capture_output=True, text=True, timeout=120, check=False)

    wrong = run("select x from rollouts")
    assert (wrong.returncode, wrong.stdout, wrong.stderr.count("\n")) == (2, "", 1)
    assert wrong.stderr.startswith("pipelinerl: SQL: Binder Error")
    several = run("--csv", text="create temp table t as select 7 as seven;\nselect seven\nfrom t;\n")
    assert (several.returncode, several.stdout.split()[-2:]) == (0, ["seven", "7"])
    answer = run("select count(*) as n from rollouts", "--json")
    assert json.loads(answer.stdout) == {"columns": ["n"], "rows": [{"n": TRAINED + 2 * SIZE}], "num_rows": 1}


def test_the_name_of_an_unknown_metric_is_noted(database):
    (note,) = database.unknown_metrics("select metrics['reward/man'] from steps where metrics['reward/mean'] > 0")
    assert note == "no step has the metric reward/man; did you mean reward/mean?"
    assert len(database.unknown_metrics("select value from metrics where name = 'reward/none_such'")) == 1
    assert database.unknown_metrics("select * from rollouts join steps using (step) where source = 'a/b'") == []


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("select cast(chr(27) || '[31mX' as integer)", r"\\x1b\[31mX"),
        ("select no_such from rollouts", "^[^\n]*$"),
    ],
)
def test_an_error_is_one_printable_line(database, statement, message):
    with pytest.raises(ConfigError, match=message) as raised:
        database.table(statement)
    assert str(raised.value).isprintable()


def test_a_statement_follows_a_result_that_was_not_read(database):
    database.sql("select range from range(1000000)")
    assert rows(database, "select 1 as a") == [{"a": 1}]


def test_maps_with_lists_as_keys_are_pairs_and_headings_are_printable(database):
    assert document(database.sql("select map{[1]: 2} as m"), 0)["rows"] == [{"m": [[[1], 2]]}]
    assert document(database.sql("select map{'a': 2} as m"), 0)["rows"] == [{"m": {"a": 2}}]
    assert table_lines(database.sql('select 1 as "\x1b[31m"'), 0)[0] == r"\x1b[31m"


def test_two_columns_of_one_name_are_no_json(database):
    with pytest.raises(ConfigError, match="two columns of the result have the name a"):
        document(database.sql("select 1 as a, 2 as a"), 0)


def test_an_unreadable_run_of_a_root_is_left_out_of_all_views_but_runs(url, tmp_path, caplog):
    root = tmp_path / "root"
    (root / "broken").mkdir(parents=True)
    (root / "broken" / "run.json").write_text("{bad")
    (root / "r-1").symlink_to(url.removeprefix("file://"))
    stores = [open_store(str(root / name)) for name in ("broken", "r-1")]
    with Database(stores) as both:
        assert {row["state"] for row in rows(both, "select state from runs")} >= {"unreadable"}
        assert rows(both, "select count(*) as n from rollouts where fate = 'trained'") == [{"n": TRAINED}]
    assert "left out of all views but runs" in caplog.text
    with pytest.raises(BrokenRecord), Database(stores[:1]) as alone:
        alone.table("select 1 from rollouts")
