"""A worked example of looking things up: search in a small corpus of short texts, then answer."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

from tranship.envs.tools import ToolEnv
from tranship.types import UserError

_WORD = re.compile(r"\w+")
_K1, _B = 1.5, 0.75
_SYLLABLES = ("ba", "do", "fi", "ka", "lu", "me", "no", "pi", "ra", "so", "ta", "vu")


class Corpus:
    """Short texts, ranked by how well they match a query: Okapi BM25 (Robertson and Zaragoza, The Probabilistic
    Relevance Framework, 2009, equation 3.15), with k1 = 1.5, b = 0.75, and a logarithm that is never negative."""

    def __init__(self, texts: list[str]) -> None:
        if not texts:
            raise UserError("env search: the corpus has no text: give at least one")
        self._texts = texts
        self._counts = [Counter(_words(text)) for text in texts]
        lengths = [sum(counts.values()) for counts in self._counts]
        mean = max(sum(lengths) / len(lengths), 1.0)
        self._penalty = [_K1 * (1 - _B + _B * length / mean) for length in lengths]
        self._found_in = Counter(word for counts in self._counts for word in counts)

    def search(self, query: str, count: int) -> list[str]:
        """At most `count` texts that share a word with the query, best first (equal ones in the corpus's order)."""
        words = sorted(set(_words(query)))
        scores = [sum(self._score(word, index) for word in words) for index in range(len(self._texts))]
        ranked = sorted(range(len(scores)), key=lambda index: -scores[index])
        return [self._texts[index] for index in ranked[:count] if scores[index] > 0]

    def _score(self, word: str, index: int) -> float:
        times, found_in = self._counts[index][word], self._found_in[word]
        rarity = math.log(1 + (len(self._texts) - found_in + 0.5) / (found_in + 0.5))
        return rarity * times * (_K1 + 1) / (times + self._penalty[index])


class Search(ToolEnv):
    """The model may call `search`; its first turn without a call is its answer, right where it holds the ground truth.

    corpus: a text file with one text on each line; null: the made-up facts that `rows` asks for. results: texts of one
    search. search_reward: given once for a sample whose search found a text that holds the answer.
    """

    def __init__(self, corpus: str | None = None, results: int = 3, search_reward: float = 0.0) -> None:
        if results < 1:
            raise UserError(f"env search: results is {results}: use at least 1")
        self.tools = [self.search]
        self._corpus = Corpus([fact["text"] for fact in facts()] if corpus is None else _read(corpus))
        self._results = results
        self._search_reward = search_reward
        self._truth = ""
        self._found = False

    def begin(self, prompt_info: dict[str, Any], seed: int) -> None:
        """Note the sample's ground truth."""
        self._truth = str(prompt_info["ground_truth"])
        self._found = False

    def search(self, query: str) -> str:
        """Search the corpus and return the texts that match best.

        Args:
            query: words to look for
        """
        found = self._corpus.search(query, self._results)
        self._found = self._found or any(_holds(text, self._truth) for text in found)
        return "\n".join(found) or "Nothing was found."

    def finish(self, answer: str) -> float:
        """1.0 where the answer holds the ground truth (in words, whatever the case), else 0.0; and search_reward."""
        return float(_holds(answer, self._truth)) + (self._search_reward if self._found else 0.0)


def facts() -> list[dict[str, str]]:
    """64 made-up facts {text, question, answer} of towns that do not exist, always the same: they cannot be known."""
    rng = random.Random(20250717)
    towns = _names(rng, 16)
    rivers, mayors, trees = _names(rng, 16), _names(rng, 16), ("oaks", "larches", "birches", "elms")
    found = []
    for index, (town, river, mayor) in enumerate(zip(towns, rivers, mayors, strict=True)):
        year, tree = str(1200 + 37 * index), trees[index % len(trees)]
        found += [
            _fact(f"The town of {town} was founded in {year}.", f"When was {town} founded?", year),
            _fact(f"{town} lies on the river {river}.", f"On which river does {town} lie?", river),
            _fact(f"The mayor of {town} is called {mayor}.", f"What is the mayor of {town} called?", mayor),
            _fact(f"The trees of {town} are {tree}.", f"Which trees grow in {town}?", tree),
        ]
    return found


def rows(split: str = "train", num_val: int = 16) -> list[dict[str, Any]]:
    """A question of each made-up fact, in verl's schema; every so many go to validation (`num_val` in all)."""
    all_facts = facts()
    if split not in ("train", "val") or not 0 < num_val < len(all_facts):
        raise UserError(
            f"search rows: split is {split!r}, num_val {num_val}: use train or val, 1..{len(all_facts) - 1}"
        )
    held_out = {index * len(all_facts) // num_val for index in range(num_val)}
    return [
        {
            "data_source": "search",
            "prompt": [{"role": "user", "content": fact["question"]}],
            "ability": "tools",
            "reward_model": {"style": "rule", "ground_truth": fact["answer"]},
            "extra_info": {"index": index},
        }
        for index, fact in enumerate(all_facts)
        if (index in held_out) == (split == "val")
    ]


def _fact(text: str, question: str, answer: str) -> dict[str, str]:
    return {"text": text, "question": question, "answer": answer}


def _names(rng: random.Random, count: int) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(rng.choice(_SYLLABLES) for _ in range(3)).capitalize()] = None
    return list(names)


def _read(path: str) -> list[str]:
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"env search: there is no file {file}: give a text file with one text on each line")
    return [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _holds(text: str, truth: str) -> bool:
    words, wanted = _words(text), _words(truth)
    return bool(wanted) and any(words[at : at + len(wanted)] == wanted for at in range(len(words)))
