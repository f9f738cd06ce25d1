"""What a user may have meant by a key that does not exist: our nearest key, or the key that another system's name
stands for."""

from __future__ import annotations

import difflib

from tranship.config.keys import KEYS, LEAVES
from tranship.config.vocabulary import VOCABULARY, Name, named


def hint(path: str) -> str:
    """A clause for the error about an unknown key: "did you mean train.optimizer.learning_rate?"."""
    ours = _same_last_word(path)
    exact = named(path)
    if exact and not any(entry.key in ours for entry in exact):
        return _elsewhere(exact)
    ours = ours or _near(path)
    if ours:
        return f"did you mean {' or '.join(ours)}?"
    other = _near_elsewhere(path)
    if other:
        return _elsewhere(other)
    section = _section(path)
    keys = [key.rpartition(".")[2] for key in KEYS if key.rpartition(".")[0] == section]
    place = f"the keys of {section}" if section else "the sections"
    return f"{place} are {', '.join(keys)}"


def _section(path: str) -> str:
    """The innermost section of ours that a path lies in; "" at the top."""
    head = path.rpartition(".")[0]
    while head and (head not in KEYS or head in LEAVES):
        head = head.rpartition(".")[0]
    return head


def _elsewhere(entries: list[Name]) -> str:
    """The systems that use the name, and our key; one part for each key of ours."""
    parts = []
    for key in dict.fromkeys(entry.key for entry in entries):
        same = [entry for entry in entries if entry.key == key]
        systems = list(dict.fromkeys(entry.system for entry in same))
        names = list(dict.fromkeys(entry.name for entry in same))
        notes = list(dict.fromkeys(entry.note for entry in same if entry.note))
        who = ", ".join(systems[:-1]) + " and " if len(systems) > 1 else ""
        what = names[0] if len(names) == 1 else names[0].rpartition(".")[2]
        verb = "calls" if len(systems) == 1 else "call"
        note = f" ({'; '.join(notes)})" if notes else ""
        parts.append(f"{who}{systems[-1]} {verb} {what} what is {key} here{note}")
    return "; ".join(parts)


def _same_last_word(path: str) -> list[str]:
    """Our keys that end in the same word, in another section: `train.learning_rate`, `group_size`."""
    word = path.rpartition(".")[2]
    matches = [key for key in LEAVES if key.rpartition(".")[2] == word and key != path]
    ranked = sorted(matches, key=lambda key: -difflib.SequenceMatcher(None, path, key).ratio())
    return ranked[:2]


def _near(path: str) -> list[str]:
    """The one key of ours that is spelt most alike, by its last word, then by its whole path."""
    word = path.rpartition(".")[2]
    section = _section(path)
    near_words = difflib.get_close_matches(word, {key.rpartition(".")[2] for key in KEYS}, n=3, cutoff=0.75)
    if near_words:
        best = near_words[0]
        keys = [key for key in KEYS if key.rpartition(".")[2] == best]
        keys.sort(key=lambda key: (not key.startswith(f"{section}.") if section else False, key.count(".")))
        return keys[:1]
    return difflib.get_close_matches(path, LEAVES, n=1, cutoff=0.8)


def _near_elsewhere(path: str) -> list[Name]:
    word = path.rpartition(".")[2]
    words = {entry.name.rpartition(".")[2] for entry in VOCABULARY}
    near = difflib.get_close_matches(word, words, n=1, cutoff=0.8)
    return [entry for entry in VOCABULARY if near and entry.name.rpartition(".")[2] == near[0]]
