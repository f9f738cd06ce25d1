"""The built-in rewards: which answers are right."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tranship.rewards.boxed import boxed, last_boxed, normalise
from tranship.rewards.numbers import canonical, exact_integer, hash_answer


@pytest.mark.parametrize(
    ("gold", "text", "score", "well_formed"),
    [
        (7, "3 + 4 = 7", 1, 1),
        ("7", "3 + 4 = 7.", 1, 1),
        ("7", "The answer is **7**!", 1, 1),
        ("7", "7, not 8", 0, 1),
        ("7", "seven", 0, 0),
        ("7", "", 0, 0),
        ("7", "It is 7.0", 1, 1),
        ("7", "It is 7.5", 0, 0),
        ("7", "007", 1, 1),
        ("-5", "-5", 1, 1),
        ("-5", "−5", 1, 1),
        ("-5", "5", 0, 1),
        ("5", "10-5", 1, 1),
        ("-5", "5 - 10 = -5", 1, 1),
        ("5", "(10)-5", 1, 1),
        ("0", "-0", 1, 1),
        ("1234", "1,234", 1, 1),
        ("12", "3,12", 0, 1),
        ("1" * 6000, "It is " + "1" * 6000, 1, 1),
    ],
)
def test_exact_integer(gold: object, text: str, score: float, well_formed: float):
    result = exact_integer("sums", text, gold)
    answer = result.pop("answer")
    assert result == {"score": score, "well_formed": well_formed}
    assert (answer == canonical(str(gold))) == bool(score)


@pytest.mark.parametrize("function", [exact_integer, hash_answer])
@pytest.mark.parametrize("gold", ["seven", "", None, True, "7 apples"])
def test_a_ground_truth_that_is_no_number_is_an_error_and_no_zero(function, gold: object):
    with pytest.raises(ValueError, match="ground_truth"):
        function("s", "7", gold)


def test_exact_integer_refuses_a_fraction_as_ground_truth():
    with pytest.raises(ValueError, match="not an integer"):
        exact_integer("s", "7", "7.5")


ANSWERS = [
    ("42", "#### 42", 1, 1),
    ("42", "#### 42" + "." * 400, 1, 1),
    ("42", "#### 42.", 1, 1),
    ("-5", "#### -5", 1, 1),
    ("-5", "#### 5", 0, 0),
    ("1234", "#### 1,234", 1, 1),
    ("18", "#### $18", 1, 1),
    ("72", "I think 72", 0, 1),
    ("42", "", 0, 0),
    ("42", "#### 41 #### 42", 1, 1),
    ("41", "#### 41 #### 42", 0, 0),
    ("3.5", "#### 3.50", 1, 1),
    ("-18", "#### -$18", 1, 1),
    ("42", "####42", 1, 1),
    ("42", "it is 41 #### 42 and 43", 1, 1),
    ("5", "#### five", 0, 0),
]


@pytest.mark.parametrize(("gold", "text", "strict", "flexible"), ANSWERS)
def test_answers_after_four_hashes(gold: str, text: str, strict: float, flexible: float):
    assert hash_answer("gsm8k", text, gold)["score"] == strict
    assert hash_answer("gsm8k", text, gold, flexible=True)["score"] == flexible


def test_well_formed_is_apart_from_right():
    assert hash_answer("g", "#### 5", "6") == {"score": 0, "well_formed": 1, "answer": "5"}
    assert hash_answer("g", "6", "6", flexible=True) == {"score": 1, "well_formed": 0, "answer": "6"}


@given(st.integers(), st.integers(0, 3))
def test_any_integer_is_found_in_any_spelling(value: int, zeros: int):
    for text in (
        f"{value}",
        f"{value:,}",
        f"{value}.",
        f"{value}.{'0' * (zeros + 1)}",
        f"${value}" * (value >= 0) or "0",
    ):
        if text == "0" and value:
            continue
        assert exact_integer("s", f"so the answer is {text}", str(value))["score"] == 1
        assert hash_answer("s", f"#### {text}", value)["score"] == 1
    assert exact_integer("s", f"so the answer is {value + 1}", value)["score"] == 0


@given(st.text())
def test_no_response_raises(text: str):
    exact_integer("s", text, 1)
    hash_answer("s", text, 1, flexible=True)
    boxed("s", text, "1")


def test_canonical_spellings():
    for text, wanted in [
        ("-1,230.50", "-1230.5"),
        ("007", "7"),
        ("-0", "0"),
        ("-0.0", "0"),
        (".5", "0.5"),
        ("7.", "7"),
    ]:
        assert canonical(text) == wanted


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{42}", "42"),
        (r"\boxed{\frac{1}{2}} done", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\fbox{3}", "3"),
        (r"\boxed {4}", "4"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{5", None),
        (r"\boxed{1} and \boxed{2", None),
        ("42", None),
        (r"\boxed{}", ""),
    ],
)
def test_the_last_box(text: str, content: str | None):
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("answer", "truth", "same"),
    [
        (r"\dfrac{1}{2}", r"\frac12", True),
        ("1/2", r"\frac{1}{2}", True),
        ("-1/2", r"-\frac{1}{2}", True),
        (r"1,234", "1234", True),
        (r"\$12.50", "12.5", True),
        (r"50\%", "50", True),
        (r"90^\circ", "90", True),
        (r"\left( 1, 2 \right)", "(1,2)", True),
        (r"\text{east}", "east", True),
        (" x^2 + 1 ", "x^2+1", True),
        (r"\leftarrow", "arrow", False),
        ("12", "21", False),
        ("(1,234)", "(1,2,34)", False),
        ("x.", "x", True),
    ],
)
def test_boxed_answers_are_compared_as_text(answer: str, truth: str, same: bool):
    assert boxed("math", rf"It is \boxed{{{answer}}}.", truth) == {
        "score": same,
        "well_formed": 1,
        "answer": normalise(answer),
    }
    assert (normalise(answer) == normalise(truth)) == same
