"""The memory that `doctor` predicts for trainer and actor on a CPU, against measured memory."""

import pytest

from benchmarks.memory import ROLES, measure_roles

pytestmark = [pytest.mark.slow]
TOLERANCE = 0.15

LARGE = [pytest.param("0.5b", dtype, 64, marks=pytest.mark.campaign) for dtype in ("float32", "bfloat16")]


@pytest.fixture(scope="module")
def trained():
    return measure_roles("135m", "float32", 252, 128, ["trainer"])["rows"][0]


@pytest.fixture(scope="module")
def generated():
    return measure_roles("135m", "float32", 252, 128, ["actor"])["rows"][0]


def check(row, stage, since, names):
    """The growth of the peak between two stages against the sum of its terms."""
    marks, parts = row["marks"], row["parts"]
    grown = marks[stage]["peak"] - (marks[since]["now"] if since else 0)
    predicted = sum(parts[name] for name in names)
    assert predicted == pytest.approx(grown, rel=TOLERANCE), (stage, names, row)


def test_the_terms_of_the_trainer_and_their_sum_are_measured(trained):
    assert trained["predicted_bytes"] == pytest.approx(trained["measured_bytes"], rel=TOLERANCE), trained
    check(trained, "process", None, ["processes"])
    check(trained, "built", "process", ["weights"])
    check(trained, "checkpoint", "built", ["checkpoint"])
    check(trained, "end", "built", ["gradients", "optimizer", "activations", "checkpoint"])


def test_the_terms_of_the_actor_and_their_sum_are_measured(generated):
    assert generated["predicted_bytes"] == pytest.approx(generated["measured_bytes"], rel=TOLERANCE), generated
    check(generated, "process", None, ["processes"])
    check(generated, "built", "process", ["weights", "KV cache"])


@pytest.mark.parametrize(
    ("model", "dtype", "tokens"), [pytest.param("135m", "bfloat16", 64, marks=pytest.mark.campaign), *LARGE]
)
def test_larger_models_and_bfloat16(model, dtype, tokens):
    for row in measure_roles(model, dtype, tokens, 64, ROLES)["rows"]:
        assert row["predicted_bytes"] == pytest.approx(row["measured_bytes"], rel=TOLERANCE), row
