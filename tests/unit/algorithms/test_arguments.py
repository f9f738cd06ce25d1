import pytest

from tranship.algorithms.arguments import bind
from tranship.types import UserError


def strict(data, *, level=1.0, exact=True, clip_low):
    return data, level, exact, clip_low


def open_ended(data, **others):
    return data, others


def bound(function, args, **offered):
    return bind(function, 1, args, setting="algorithm.loss_args", offered=offered)


def test_a_function_gets_its_arguments_and_what_it_takes_of_the_offered():
    call, unused = bound(strict, {"level": 2}, clip_low=0.1, clip_high=0.3)
    assert call("x") == ("x", 2, True, 0.1)
    assert unused == ("clip_high",)
    call, unused = bound(open_ended, {"level": 2}, clip_low=0.1)
    assert call("x") == ("x", {"level": 2, "clip_low": 0.1})
    assert unused == ()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"levle": 1}, "algorithm.loss_args: 'strict' takes no 'levle'; it takes: level, exact"),
        ({"data": 1}, "takes no 'data'"),
        ({"level": "high"}, "level of 'strict' is 'high', not a number"),
        ({"level": True}, "not a number"),
        ({"exact": 1}, "not true or false"),
        ({"clip_low": 0.2}, "'clip_low' is a setting of its own"),
    ],
)
def test_an_argument_that_does_not_fit_is_named(args, said):
    with pytest.raises(UserError, match=said):
        bound(strict, args, clip_low=0.1)


def test_a_missing_argument_is_named():
    with pytest.raises(UserError, match="'strict' needs 'clip_low'"):
        bound(strict, {})
