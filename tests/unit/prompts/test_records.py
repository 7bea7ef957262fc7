"""Data is what the file says: no reader guesses types, in any format, until it reaches reward and environment."""

import csv
import gzip
import io
import json
from datetime import UTC, date, datetime
from decimal import Decimal

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.messages import Lease, encode
from pipelinerl_core.models.resolve import build_config
from pipelinerl_core.prompts import build_source
from pipelinerl_core.prompts.records import read_file
from tests.unit.environments.episode_case import ScriptedHost, played

# What readers that guess types change: dates, times, digits, leading zeros, words for missing values.
TEXTS = st.sampled_from(
    ["2024-02-11", "2024-01-01T03:00:00Z", "12345678901234567890", "002", "1e5", "NA", "null", "", "True", "1_000"]
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
LEAVES = LEAVES | st.text(st.characters(exclude_categories=["Cs"])) | TEXTS
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab.", max_size=2), inner, max_size=3)
)
FORMATS = ("rows.jsonl", "rows.json", "huggingface")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)


def source(path, kind="file", **prompts):
    values = {"kind": kind, "path": str(path), "template": "{n}: {prompt}", **prompts}
    return build_source(build_config({"prompts": values, "reward": {"function": "mine.py:score"}}))


def tasks(source):
    """Every prompt by the number of its row."""
    prompts = [source.prompt(index) for index in range(source.num_training)] + source.held_out(10**6)
    return [prompt for _, prompt in sorted((int(prompt.task["n"]), prompt) for prompt in prompts)]


def written(directory, name, rows):
    """The path of the rows in a file of this name, or of a directory that datasets would read."""
    if name == "huggingface":
        (directory / "hub").mkdir(exist_ok=True)
        path = directory / "hub" / "train.jsonl"
    else:
        path = directory / name
    is_list = name == "rows.json"
    path.write_text(json.dumps(rows) if is_list else "".join(json.dumps(row) + "\n" for row in rows))
    return path.parent if name == "huggingface" else path


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(VALUES, min_size=2, max_size=5), prompt=st.text(st.characters(exclude_categories=["Cs"])) | TEXTS
)
@pytest.mark.parametrize("name", FORMATS)
def test_any_json_value_reaches_template_and_message_unchanged(tmp_path_factory, name, values, prompt):
    rows = [{"n": n, "prompt": prompt, "value": value} for n, value in enumerate(values)]
    path = written(tmp_path_factory.mktemp("data"), name, rows)
    kind = "huggingface" if name == "huggingface" else "file"
    prompts = tasks(source(path, kind))
    assert [task_prompt.text for task_prompt in prompts] == [f"{n}: {prompt}" for n in range(len(rows))]
    for task_prompt, row in zip(prompts, rows, strict=True):
        exact = json.loads(json.dumps(row))
        assert json.dumps(task_prompt.task) == json.dumps(exact)  # as text, so that 1, 1.0 and true differ
        lease = Lease(
            group_id=0, attempt=0, lease_id="a", deadline_seconds=1, group_size=1, prompt=task_prompt, holders=()
        )
        received = Lease.model_validate_json(encode(lease)).prompt
        assert json.dumps(received.task) == json.dumps(exact)
        assert received.text == task_prompt.text


ODD = [
    *("2024-02-11", "2024-01-01T03:00:00Z", "002", "", None, True, 12345678901234567890, 10**40, -(2**63), 1.0, 1e22),
    *(0.1, 5e-324, [1, "1", [None]], {"day": "2024-02-11", "none": None, "a.b": {}}, "\u2028\x00\U0001f600", "NaN"),
]


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_the_answer_keeps_its_digits_and_its_text(tmp_path, suffix):
    answers = ["2024-02-11", 12345678901234567890, "002", True, 1.5]
    rows = [{"n": n, "prompt": "p", "answer": answer} for n, answer in enumerate(answers)]
    path = written(tmp_path, f"rows{suffix}", rows)
    prompts = tasks(source(path))
    assert [prompt.task["answer"] for prompt in prompts] == [
        "2024-02-11",
        12345678901234567890,
        "002",
        True,
        1.5,
    ]
    values = {"kind": "file", "path": str(path), "template": "{n}: {prompt}"}
    texts = tasks(build_source(build_config({"prompts": values})))
    assert [prompt.task["answer"] for prompt in texts][1:] == ["12345678901234567890", "002", "true", "1.5"]


def test_odd_values_reach_the_environment_as_they_are_in_the_file(tmp_path):
    rows = [
        {"n": n, "prompt": "p", "value": value, "exact": json.dumps(value, sort_keys=True)}
        for n, value in enumerate(ODD)
    ]
    prompts = tasks(source(written(tmp_path, "rows.jsonl", rows)))
    code = """
import json

class Env:
    weights = {"same": 1.0}

    async def play(self, task, ask, seed):
        return (await ask([{"role": "user", "content": "?"}])).text

    def score(self, task, transcript):
        return {"same": json.dumps(task["value"], sort_keys=True) == task["exact"]}
"""
    results = played(code, *(ScriptedHost("1") for _ in prompts), tasks=[prompt.task for prompt in prompts])
    assert [result.score for result in results] == [1.0] * len(ODD)


@pytest.mark.parametrize(
    ("suffix", "separator", "kind"),
    [
        (".csv", ",", "file"),
        (".csv", ",", "huggingface"),
        (".tsv", "\t", "file"),
        (".tsv", "\t", "huggingface"),
        (".csv", ";", "file"),
        (".csv", "\t", "file"),
    ],
)
def test_fields_of_a_csv_file_are_text(tmp_path, suffix, separator, kind):
    values = ["002", "2024-02-11", "12345678901234567890", "NA", "", "1e5", 'a "b"\nc', "True", "größe,;\t"]
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=separator)
    writer.writerows([["n", "prompt", "value"], *([n, f"p{n}", value] for n, value in enumerate(values))])
    (tmp_path / f"train{suffix}").write_text("\ufeff" + text.getvalue(), encoding="utf-8", newline="")
    path = tmp_path if kind == "huggingface" else tmp_path / f"train{suffix}"
    assert [prompt.task for prompt in tasks(source(path, kind))] == [
        {"n": str(n), "prompt": f"p{n}", "value": value} for n, value in enumerate(values)
    ]


LABELS = datasets.Features(
    {
        "n": datasets.Value("int64"),
        "prompt": datasets.Value("string"),
        "answer": datasets.ClassLabel(names=["no", "yes"]),
        "all": datasets.List(datasets.ClassLabel(names=["no", "yes"])),
    }
)


@pytest.mark.parametrize("form", ["saved", "parquet", "hub"])
def test_a_class_label_is_its_name(tmp_path, form):
    rows = [{"n": n, "prompt": "p", "answer": n % 2, "all": [1, n % 2]} for n in range(6)]
    data = datasets.Dataset.from_list(rows, features=LABELS)
    if form == "saved":
        data.save_to_disk(str(tmp_path / "data"))
    else:
        (tmp_path / "data").mkdir()
        data.to_parquet(str(tmp_path / "data" / "train.parquet"))
    path = tmp_path / "data" / "train.parquet" if form == "parquet" else tmp_path / "data"
    prompts = tasks(source(path, "file" if form == "parquet" else "huggingface"))
    assert [prompt.task["answer"] for prompt in prompts] == ["no", "yes"] * 3
    assert [prompt.task["all"] for prompt in prompts] == [["yes", "no"], ["yes", "yes"]] * 3


def test_a_row_without_a_label_has_no_answer(tmp_path):
    rows = [{"n": n, "prompt": "p", "answer": n - 1, "all": []} for n in range(3)]
    datasets.Dataset.from_list(rows, features=LABELS).save_to_disk(str(tmp_path / "data"))
    prompts = tasks(source(tmp_path / "data", "huggingface"))
    assert [prompt.task["answer"] for prompt in prompts] == [None, "no", "yes"]


def test_labels_that_a_card_declares_are_names_in_csv_files(tmp_path):
    (tmp_path / "train.csv").write_text("n,prompt,answer\n0,a,1\n1,b,0\n2,c,yes\n")
    (tmp_path / "README.md").write_text(
        "---\ndataset_info:\n  features:\n  - {name: n, dtype: int64}\n  - {name: prompt, dtype: string}\n"
        "  - name: answer\n    dtype:\n      class_label:\n        names: {'0': 'no', '1': 'yes'}\n---\n"
    )
    assert [prompt.task["answer"] for prompt in tasks(source(tmp_path, "huggingface"))] == ["yes", "no", "yes"]


def test_a_part_of_a_split_is_read_from_text_files(tmp_path):
    for split, numbers in {"train": range(8), "test": range(100, 104)}.items():
        rows = "".join(json.dumps({"n": number, "prompt": "p"}) + "\n" for number in numbers)
        (tmp_path / f"{split}.jsonl").write_text(rows)
    prompts = tasks(source(tmp_path, "huggingface", split="train[25%:50%]+test"))
    assert [prompt.task["n"] for prompt in prompts] == [2, 3, 100, 101, 102, 103]
    with pytest.raises(ConfigError, match=r"prompts.split=dev: .* has the splits train, test"):
        source(tmp_path, "huggingface", split="dev")


def test_options_of_a_reader_that_are_not_supported_are_refused_in_one_line(tmp_path):
    (tmp_path / "train.csv").write_text("skipped\nn,prompt\n0,a\n1,b\n")
    card = "---\nconfigs:\n- config_name: default\n  data_files: train.csv\n  skiprows: 1\n---\n"
    (tmp_path / "README.md").write_text(card)
    with pytest.raises(ConfigError, match=r"its configuration sets skiprows for the reader .* Convert the files"):
        source(tmp_path, "huggingface")


def test_lost_values_of_a_table_are_reported_once_by_column(tmp_path):
    table = pa.table(
        {
            "n": [0, 1],
            "prompt": ["a", "b"],
            "day": [date(2024, 2, 11), None],
            "at": [datetime(2024, 1, 1, 3, tzinfo=UTC)] * 2,
            "price": [Decimal("1.50")] * 2,
            "count": [3.0, 2.0**60],
            "share": [0.5, float("nan")],
            "odds": [2.0, float("inf")],
            "image": [b"\x00\xff", b""],
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    records = read_file(tmp_path / "rows.parquet", "prompts.path=rows.parquet")
    assert list(records) == [
        {"n": 0, "prompt": "a", "day": "2024-02-11", "at": "2024-01-01T03:00:00+00:00", "price": "1.50", "count": 3.0,
         "share": 0.5, "odds": 2.0, "image": None},
        {"n": 1, "prompt": "b", "day": None, "at": "2024-01-01T03:00:00+00:00", "price": "1.50", "count": 2.0**60,
         "share": None, "odds": None, "image": None},
    ]  # fmt: skip
    assert [note.replace("\n", "") for note in source(tmp_path / "rows.parquet").summary()[1:]] == [
        "column day holds date32[day], not text: its values are given as text such as '2024-02-11'",
        "column at holds timestamp[us, tz=UTC], not text: its values are given as text such as "
        "'2024-01-01T03:00:00+00:00'",
        "column price holds decimal128(3, 2), not text: its values are given as text such as '1.50'",
        "column count holds double: its whole numbers are given as 3.0, and may have lost digits",
        "column odds holds double: its whole numbers are given as 2.0",
        "column image holds binary: its values are given as null",
    ]


def test_empty_answers_are_counted(tmp_path):
    rows = [{"n": n, "prompt": "p", "answer": "" if n % 2 else "1"} for n in range(4)]
    assert (
        "2 rows have an empty answer: an empty reply would be right"
        in source(written(tmp_path, "rows.jsonl", rows)).summary()
    )


@pytest.mark.parametrize("form", ["saved", "directory", "card", "file"])
@pytest.mark.parametrize("names", [["1", "0"], ["-1", "0", "1"], ["1", "2", "3"]])
def test_class_labels_whose_names_are_numbers_are_mapped_once(tmp_path, form, names):
    features = datasets.Features(
        {"prompt": datasets.Value("string"), "n": datasets.Value("int64"),
         "answer": datasets.ClassLabel(names=names), "meta": {"inner": datasets.ClassLabel(names=names)}}
    )  # fmt: skip
    rows = [{"prompt": f"p{number}", "n": number, "answer": number, "meta": {"inner": number}}
            for number in range(len(names))]  # fmt: skip
    data = datasets.Dataset.from_list(rows, features=features)
    path, kind = tmp_path / "data", "huggingface"
    if form == "saved":
        data.save_to_disk(str(path))
    else:
        path.mkdir()
        data.to_parquet(path / "train.parquet")
    if form == "card":
        declared = "".join(f"          '{number}': '{name}'\n" for number, name in enumerate(names))
        (path / "README.md").write_text(
            "---\ndataset_info:\n  features:\n  - name: prompt\n    dtype: string\n  - name: n\n    dtype: int64\n"
            f"  - name: answer\n    dtype:\n      class_label:\n        names:\n{declared}"
            f"  - name: meta\n    struct:\n    - name: inner\n      dtype:\n        class_label:\n          names:\n"
            + "".join(f"            '{number}': '{name}'\n" for number, name in enumerate(names))
            + "---\n"
        )
    if form == "file":
        path, kind = path / "train.parquet", "file"
    prompts = tasks(source(path, kind))
    assert [prompt.task["answer"] for prompt in prompts] == names
    assert [prompt.task["meta"]["inner"] for prompt in prompts] == names


def test_a_label_that_is_text_in_json_is_a_name(tmp_path):
    (tmp_path / "README.md").write_text(
        "---\ndataset_info:\n  features:\n  - name: prompt\n    dtype: string\n  - name: n\n    dtype: int64\n"
        "  - name: answer\n    dtype:\n      class_label:\n        names:\n"
        "          '0': '1'\n          '1': '0'\n---\n"
    )
    rows = [{"prompt": "a", "n": 0, "answer": "1"}, {"prompt": "b", "n": 1, "answer": 1}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [prompt.task["answer"] for prompt in tasks(source(tmp_path, "huggingface"))] == ["1", "0"]


def test_an_archive_that_was_written_again_is_read_again(tmp_path):
    for answer in ("first", "second"):
        rows = [{"prompt": f"{answer} {number}", "n": number, "answer": answer} for number in range(4)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "train.jsonl.gz").write_bytes(gzip.compress(text.encode()))
        assert {prompt.task["answer"] for prompt in tasks(source(tmp_path, "huggingface"))} == {answer}


def test_parquet_files_of_a_directory_keep_their_own_types(tmp_path):
    for number, values in enumerate([[7, 8], ["002", "x"]]):
        table = pa.table({"prompt": ["a", "b"], "n": [2 * number, 2 * number + 1], "answer": values})
        pyarrow.parquet.write_table(table, tmp_path / f"train-{number}.parquet")
    prompts = tasks(source(tmp_path, "huggingface", prompt_column="prompt"))
    assert [prompt.task["answer"] for prompt in prompts] == [7, 8, "002", "x"]


@pytest.mark.parametrize("number", ["1e400", f"1{'0' * 400}.5", f"{'9' * 280}e99"])
@pytest.mark.parametrize("form", ["{}", "[{}]"])
def test_a_number_beyond_floating_point_is_refused_in_every_form(tmp_path, number, form):
    path = tmp_path / ("rows.jsonl" if form == "{}" else "rows.json")
    path.write_text(form.replace("{}", f'{{"prompt": "a", "n": 1, "answer": {number}}}'))
    with pytest.raises(ConfigError, match="beyond the range of floating-point numbers"):
        source(path)


def test_lost_values_inside_of_structs_and_lists_and_in_half_precision_are_reported(tmp_path):
    table = pa.table(
        {
            "prompt": ["a", "b"], "n": [0, 1], "answer": ["1", "2"],
            "meta": pa.array([{"day": date(2024, 2, 11), "mean": 2.0}] * 2),
            "values": pa.array([[1.0], [2.0]], pa.list_(pa.float64())),
            "half": pa.array([1.0, 2.0], pa.float16()),
        }
    )  # fmt: skip
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    notes = " ".join(read_file(tmp_path / "rows.parquet", "key").notes)
    for name in ("meta.day holds date32", "meta.mean holds double", "values[] holds double", "half holds halffloat"):
        assert f"column {name}" in notes
