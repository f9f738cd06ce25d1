"""The reward of the speed benchmarks: differs between almost any two texts, so that every group has a signal.

Imports nothing: every side loads this very file, also from environments in which tranship is not installed.
"""

_COUNTED = frozenset("0123456789aeiouAEIOU")


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """The share of digits and vowels among the characters of a text, from 0 to 1; 0 for an empty one."""
    return sum(character in _COUNTED for character in solution_str) / max(1, len(solution_str))
