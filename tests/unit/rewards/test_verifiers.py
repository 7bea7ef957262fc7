"""Verifiers, by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl_core.rewards.gym import tagged_answer
from pipelinerl_core.rewards.verifiers import exact_match, last_number, sums


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("7,15.15", 1.0),
        (".15", 1.0),
        ("7,14.14", 0.0),
        ("15", 0.0),  # no point, so no answer
        (".15.16", 0.0),  # the last point counts
        (".16.15", 1.0),
        (".150", 0.0),
        (".015", 0.0),
        (".15 ", 0.0),
        (".", 0.0),
        ("", 0.0),
    ],
)
def test_sums(text, reward):
    assert sums(text, {"answer": "15"}) == reward


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("42", "42", 1.0),
        ("  42.\n", "42", 1.0),
        ("43", "42", 0.0),
        ("the answer is 42", "42", 0.0),
        (r"6 * 7, so \boxed{42}", "42", 1.0),
        (r"\boxed{41} or rather \boxed{42}", "42", 1.0),
        (r"\boxed{42} or rather \boxed{41}", "42", 0.0),
        (r"\boxed{\frac{1}{2}}.", r"\frac{1}{2}", 1.0),
        (r"\boxed{42} and \boxed{4", "42", 1.0),  # cut off: the last whole one counts
        (r"\boxed{", "42", 0.0),
        ("6 * 7 = 42\n#### 42", "42", 1.0),
        ("#### 41 #### 42", "42", 1.0),
        (r"#### 41, no \boxed{42}", "42", 1.0),  # the box comes first
        ("1,234,567", "1234567", 1.0),
        ("12,34", "1234", 0.0),  # no separator of thousands
        ("$1,000", "1000", 1.0),
        ("$42$.", "42", 1.0),  # a sentence ends after or within the formula
        ("$42.$", "42", 1.0),
        ("$.5$", ".5", 1.0),
        ("5", ".5", 0.0),
        ("new   York", "new York", 1.0),
        ("New York", "new York", 0.0),
        (r"\boxed{\$1{,}234}", "#### 1,234", 1.0),
        (r"\boxed{10080}", r"\boxed{10,\!080}", 1.0),
        (r"so \boxed{\left\{\frac{1}{2}\right.}", r"\boxed{\left\{\frac{1}{2}\right.}", 1.0),
        (r"\boxed{\{1,2\}}", r"\{1,2\}", 1.0),
        ("#### 1,234", "She has 1,200 + 34.\n#### 1234", 1.0),  # a worked solution as reference
        ("", "42", 0.0),
    ],
)
def test_exact_match(text, answer, reward):
    assert exact_match(text, {"answer": answer}) == reward


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("59", "59", 1.0),
        ("The largest number is 59.", "59", 1.0),
        ("59 is larger than 46", "59", 0.0),  # the last number counts
        ("46, 56, 59", "59", 1.0),
        ("159", "59", 0.0),
        ("fifty-nine", "59", 0.0),
        ("", "59", 0.0),
        ("It costs $1,234.50!", "1234.5", 1.0),
        ("12,34", "34", 1.0),  # no thousands separator: two numbers
        ("12345,678", "678", 1.0),
        ("1,2345", "2345", 1.0),
        ("3.0", "3", 1.0),
        ("007", "7", 1.0),
        ("0.50", "0.5", 1.0),
        ("1{,}000", r"1,\!000", 1.0),
        ("0", r"1,\!000", 0.0),
        ("30", "3", 0.0),
        ("x = -4", "-4", 1.0),
        ("x = \u22124", "-4", 1.0),  # the minus sign of typography
        ("x = 4", "-4", 0.0),
        ("10-20", "20", 1.0),  # a range has no negative number
        ("10 -20", "-20", 1.0),
        ("-0", "0", 1.0),
        ("0.75", ".75", 1.0),
        ("75", ".75", 0.0),
        ("x = -.75", "-0.75", 1.0),
        ("5-.75", "0.75", 1.0),
        ("1.2.75", "75", 1.0),  # a point within or after a number or a word begins none
        ("v.75", "75", 1.0),
        ("So ...75", "75", 1.0),
        ("59", "She counts 46 + 13.\n#### 59", 1.0),  # a worked solution as reference
    ],
)
def test_last_number(text, answer, reward):
    assert last_number(text, {"answer": answer}) == reward


def test_a_reference_without_a_number_is_an_error_and_not_a_zero():
    with pytest.raises(ValueError, match="the reference 'none' has no number"):
        last_number("59", {"answer": "none"})


@given(st.text("0123456789,.- \u2212\u0663"))
def test_last_number_accepts_any_text(text):
    assert last_number(text + " 7", {"answer": "7"}) == 1.0


def test_a_task_without_an_answer_is_an_error_and_not_a_zero():
    with pytest.raises(KeyError):
        sums(".15", {})
    with pytest.raises(KeyError):
        exact_match("15", {})


def last_boxed_by_definition(text):
    """From the last start that is closed: tries every start, one after the other."""
    starts = [place for place in range(len(text)) if text.startswith("\\boxed{", place)]
    for start in reversed(starts):
        depth = 1
        position = start + 7
        while position < len(text):
            pair = text[position : position + 2]
            if pair in ("\\{", "\\}") or (pair == "\\\\" and not text.startswith("boxed{", position + 2)):
                position += 2
                continue
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[start + 7 : position]
            position += 1
    return None


@given(st.lists(st.sampled_from(["\\boxed{", "{", "}", "4", "2", "\\", "boxed"]), max_size=14).map("".join))
def test_the_last_box_that_is_closed_holds_the_answer(text):
    expected = last_boxed_by_definition(text)
    if expected is not None:
        assert exact_match(text, {"answer": "\\boxed{" + expected + "}"}) == 1.0
        assert exact_match(text, {"answer": "\\boxed{7}"}) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{" * 300_000,
        "\\boxed{" * 300_000 + "}" * 299_999,
        "{" * 1_000_000,
        "}" * 1_000_000,
        "1," * 1_000_000,
        "1,234" * 500_000,
        "####" * 500_000,
        " " * 2_000_000 + "x",
        "$" * 2_000_000 + "x" + "." * 2_000_000,
        "." * 2_000_000,
        ".1" * 1_000_000,
        "<answer>" * 300_000,
        "<answer></answer>" * 300_000,
    ],
    ids=lambda text: text[:12],
)
def test_long_texts_take_linear_time(text):
    """Quadratic, each would take longer than a test may."""
    assert sums(text, {"answer": "42"}) == 0.0
    assert exact_match(text, {"answer": "42"}) == 0.0
    assert last_number(text, {"answer": "42"}) == 0.0
    assert len(tagged_answer(text)) <= len(text)
