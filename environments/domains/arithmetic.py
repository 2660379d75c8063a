"""Single turn, exact answer: sums that a small model can learn to do and to write without chatter.

Half credit when the last number of the reply is right, full credit when the reply is only that number (the reward under
which SmolLM2-135M was seen to learn). Held-out pairs are chosen by a digest of the *unordered* pair, so that no seed and no
order of the operands carries one into training; every unordered pair appears at most once in a stream.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

from data_contracts.errors import ConfigError
from data_contracts.records import Budgets, EnvironmentSpec, Message, Problem, Split, VerifierSpec
from environments.base import Domain, Environment, EnvironmentContext, Exploit, Policy
from environments.scripted import plays, says
from environments.single_turn import SingleTurn

PROMPT = "What is {a} {sign} {b}? Answer with only the number."
"""The wording, in one place: what a base model does with it decides how much variance there is to learn from."""
HELDOUT_OF_FIVE = 1
MAX_STREAM = 20_000


class _Level(NamedTuple):
    name: str
    sign: str
    low: int
    high: int
    difficulty: float


_ADD_ONE = _Level("add1", "+", 1, 9, 0.1)
_ADD_TWO = _Level("add2", "+", 10, 99, 0.3)
_ADD_THREE = _Level("add3", "+", 100, 999, 0.6)
_SUBTRACT = _Level("sub2", "-", 10, 99, 0.4)
_MULTIPLY = _Level("mul2", "*", 2, 99, 0.8)
_LEVELS: dict[str, tuple[_Level, ...]] = {
    "default": (_ADD_TWO,),
    "one_digit": (_ADD_ONE,),
    "three_digit": (_ADD_THREE,),
    "subtraction": (_SUBTRACT,),
    "multiplication": (_MULTIPLY,),
    "mixed": (_ADD_TWO, _ADD_ONE, _SUBTRACT, _ADD_TWO),
}


def split_of(sign: str, a: int, b: int) -> Split:
    """Which split a pair belongs to, whatever its order: one fifth is held out."""
    digest = hashlib.sha256(f"{sign}:{min(a, b)}:{max(a, b)}".encode()).digest()
    return "heldout" if digest[0] % 5 < HELDOUT_OF_FIVE else "train"


class Arithmetic(Domain):
    name = "arithmetic"
    family = "mathematics"
    summary = "single turn: exact answers to generated sums"
    floor = 0.05
    levels: ClassVar[dict[str, str]] = {
        "default": "addition of two-digit numbers",
        "one_digit": "addition of one-digit numbers (36 train and 9 held-out pairs, more or less)",
        "three_digit": "addition of three-digit numbers",
        "subtraction": "two-digit numbers, results of either sign",
        "multiplication": "numbers up to 99",
        "mixed": "half two-digit addition, the rest one-digit addition and subtraction",
    }

    def problems(self, split: Split, *, seed: int, level: str = "default", **settings: Any) -> Iterator[Problem]:
        """Finite: at most 20,000 problems of each kind, each unordered pair once."""
        if level not in _LEVELS or settings:
            raise ConfigError(
                f"arithmetic has no level '{level}'"
                if level not in _LEVELS
                else f"arithmetic has no settings {sorted(settings)}",
                field="level" if level not in _LEVELS else "settings",
                remedy=f"Levels: {', '.join(_LEVELS)}; no settings",
            )
        parts = _LEVELS[level]
        streams = {part: _pairs(part, split, seed=seed) for part in dict.fromkeys(parts)}
        while streams:
            for part in parts:
                pair = next(streams[part], None) if part in streams else None
                if pair is None:
                    streams.pop(part, None)
                else:
                    yield _problem(part, split, *pair)

    def environment(self, problem: Problem, context: EnvironmentContext) -> Environment:
        return SingleTurn(problem, context)

    def oracle(self, problem: Problem) -> Policy:
        return plays(says(str(problem.verifier.settings["expected"])))

    def exploits(self) -> Sequence[Exploit]:
        def right_then_wrong(problem: Problem) -> Policy:
            value = int(problem.verifier.settings["expected"])
            return plays(says(f"{value} {value + 1}"))

        def inside_a_word(problem: Problem) -> Policy:
            return plays(says(f"n{problem.verifier.settings['expected']}n"))

        def all_numbers(problem: Problem) -> Policy:
            return plays(says(" ".join(map(str, range(-100, 9_900))) + " 9901"))

        def other_digits(problem: Problem) -> Policy:
            shifted = str(problem.verifier.settings["expected"]).translate({ord("0") + i: 0x0660 + i for i in range(10)})
            return plays(says(shifted))

        return (
            Exploit(name="empty_answer", policy=lambda problem: plays(says("  "))),
            Exploit(name="repeats_the_question", policy=lambda problem: plays(says(problem.messages[-1].content))),
            Exploit(name="right_then_wrong", policy=right_then_wrong),
            Exploit(name="all_numbers", policy=all_numbers),
            Exploit(name="digits_inside_a_word", policy=inside_a_word),
            Exploit(name="digits_of_another_script", policy=other_digits),
            Exploit(name="injects_a_verdict", policy=lambda problem: plays(says('{"score": 1.0, "passed": true} 1e309 NaN'))),
        )


def _pairs(part: _Level, split: Split, *, seed: int) -> Iterator[tuple[int, int]]:
    width = part.high - part.low + 1
    rng = random.Random(f"arithmetic:{part.name}:{split}:{seed}")
    seen: set[tuple[int, int]] = set()
    for index in rng.sample(range(width * width), min(width * width, 6 * MAX_STREAM)):
        a, b = part.low + index // width, part.low + index % width
        key = (min(a, b), max(a, b))
        copied = _result(part.sign, a, b) in key  # an answer that can be copied from the question teaches copying
        if key not in seen and not copied and split_of(part.sign, a, b) == split:
            seen.add(key)
            yield a, b
            if len(seen) == MAX_STREAM:
                return


def _result(sign: str, a: int, b: int) -> int:
    return {"+": a + b, "-": a - b, "*": a * b}[sign]


def _problem(part: _Level, split: Split, a: int, b: int) -> Problem:
    expected = _result(part.sign, a, b)
    return Problem(
        id=f"arithmetic/{split}/{part.name}-{a}-{b}",
        domain="arithmetic",
        split=split,
        difficulty=part.difficulty,
        messages=(Message(role="user", content=PROMPT.format(a=a, sign=part.sign, b=b)),),
        environment=EnvironmentSpec(kind="arithmetic"),
        verifier=VerifierSpec(
            kind="exact_answer",
            settings={"rule": "number", "expected": str(expected), "weights": {"correct": 0.5, "strict": 0.5}},
        ),
        budgets=Budgets(max_turns=1, max_tokens_per_turn=16, max_episode_tokens=256, max_tool_calls=0),
        metadata={"operation": part.name},
    )
