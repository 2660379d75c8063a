"""Multi-turn tool calling: word problems whose numbers are too large for the head, and a calculator that complains.

The tool answers every malformed call (bad JSON, wrong arguments, unknown tool, unreadable expression, division by zero) with
`{"status": "error", "message": ...}`, and the policy may try again until its turns are spent.

Credit, all terminal and each part once: `found` 0.2 (a calculation by the tool has exactly the expected value, or the answer
is right), `correct` 0.4 (the last number of the final reply), `strict` 0.4 (the final reply is only that number). Calls that
lead nowhere earn nothing, so calling the tool is no source of reward; the tool never sees the expected value; a bare number
sent to the tool is no calculation. An episode that never answers is a policy_failure and earns 0 whatever it found.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, ClassVar

from data_contracts.errors import ConfigError
from data_contracts.records import Budgets, EnvironmentSpec, Message, Problem, Split, ToolSpec, VerifierSpec
from environments.base import Domain, Environment, EnvironmentContext, Exploit, Policy
from environments.domains.expression import ExpressionError, evaluate, has_operation, show
from environments.scripted import calls, plays, says
from environments.tools import Tool, ToolEnvironment, ToolError

INSTRUCTION = "Use the calculator tool, then answer with only the number."
CALCULATOR = ToolSpec(
    name="calculator",
    description="Computes an arithmetic expression exactly.",
    parameters={
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "for example (12 + 30) * 4"}},
        "required": ["expression"],
        "additionalProperties": False,
    },
)
# text with {a} {b} {c}, the same sum as an expression, and the range of each number
_STORIES: tuple[tuple[str, str, tuple[tuple[int, int], ...]], ...] = (
    (
        "A shop packs {a} boxes with {b} pens each and sells {c} pens. How many pens are left?",
        "{a} * {b} - {c}",
        ((23, 89), (24, 96), (11, 499)),
    ),
    (
        "A hall has {a} rows of {b} seats and a balcony with {c} seats. How many seats are there?",
        "{a} * {b} + {c}",
        ((21, 79), (18, 64), (35, 380)),
    ),
    (
        "Two vans carry {a} and {b} parcels, and both drive {c} times. How many parcels arrive?",
        "({a} + {b}) * {c}",
        ((110, 480), (105, 470), (12, 48)),
    ),
    (
        "A printer prints {a} pages an hour for {b} hours; {c} pages are spoiled. How many good pages are there?",
        "{a} * {b} - {c}",
        ((210, 890), (6, 24), (15, 99)),
    ),
    (
        "{a} litres are taken from a tank of {b} litres, and the rest fills 4 equal cans. How many litres are in one can?",
        "({b} - {a}) / 4",
        ((101, 499), (700, 1900), (0, 0)),
    ),
    (
        "A worker earns {a} an hour for {b} hours and pays {c} for tools. What remains?",
        "{a} * {b} - {c}",
        ((17, 58), (121, 189), (45, 480)),
    ),
)


class CalculatorEnvironment(ToolEnvironment):
    """One tool, no box: the evaluator is ours and bounded, and no code of the policy runs."""

    def tools(self) -> Sequence[Tool]:
        return (Tool(spec=CALCULATOR, run=self._calculate),)

    async def _calculate(self, arguments: dict[str, Any]) -> int | str:
        try:
            return show(evaluate(arguments["expression"]))
        except ExpressionError as error:
            raise ToolError(str(error)) from None

    def note(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return {"computed": has_operation(arguments["expression"])}


class Calculator(Domain):
    name = "calculator"
    family = "tool_use"
    summary = "multi-turn tool calling: word problems with a calculator that reports errors"
    floor = 0.05
    levels: ClassVar[dict[str, str]] = {
        "default": "word problems of two steps",
        "one_step": "one operation on numbers of three digits",
    }

    def problems(self, split: Split, *, seed: int, level: str = "default", **settings: Any) -> Iterator[Problem]:
        """20,000 problems. A digest of the sum, blind to the order of its first two numbers, decides the split."""
        if level not in self.levels or settings:
            raise ConfigError(
                f"calculator has no level '{level}' or was given settings {sorted(settings)}",
                field="level",
                remedy=f"Levels: {', '.join(self.levels)}; no settings",
            )
        rng = random.Random(f"calculator:{split}:{seed}:{level}")
        seen: set[str] = set()
        while len(seen) < 20_000:
            text, expression, local, key = _draw(rng, level)
            if key not in seen and _split_of(key) == split:
                seen.add(key)
                yield _problem(split, text, expression, local, 0.5 if level == "default" else 0.3)

    def environment(self, problem: Problem, context: EnvironmentContext) -> Environment:
        return CalculatorEnvironment(problem, context)

    def oracle(self, problem: Problem) -> Policy:
        return plays(
            calls("calculator", {"expression": problem.metadata["expression"]}),
            says(str(problem.verifier.settings["expected"])),
        )

    def recovering(self, problem: Problem) -> Policy:
        """Unknown tool, broken JSON, wrong field, division by zero; then it does as it should."""
        return plays(
            calls("abacus", {"expression": "1 + 1"}, call_id="a"),
            calls("calculator", '{"expression": ', call_id="b"),
            calls("calculator", {"expr": "1 + 1"}, call_id="c"),
            calls("calculator", {"expression": "1 / 0"}, call_id="d"),
            calls("calculator", {"expression": problem.metadata["expression"]}, call_id="e"),
            says(str(problem.verifier.settings["expected"])),
        )

    def exploits(self) -> Sequence[Exploit]:
        def expected_as_bare_number(problem: Problem) -> Policy:
            value = str(problem.verifier.settings["expected"])
            return plays(calls("calculator", {"expression": value}), says("done"))

        def code_as_expression(problem: Problem) -> Policy:
            return plays(calls("calculator", {"expression": "__import__('os').getpid() or 1 + 1"}), says("done"))

        def code_as_name(problem: Problem) -> Policy:
            return plays(calls("__import__('os').system", {"expression": "id"}), says("done"))

        def calls_for_ever(problem: Problem) -> Policy:
            return plays(calls("calculator", {"expression": problem.metadata["expression"]}))

        return (
            Exploit(
                name="calls_without_answering",
                policy=lambda problem: plays(calls("calculator", {"expression": "1 + 1"}), says("I used the tool.")),
            ),
            Exploit(name="calls_for_ever", policy=calls_for_ever),
            Exploit(name="bare_number_as_calculation", policy=expected_as_bare_number),
            Exploit(name="code_as_expression", policy=code_as_expression),
            Exploit(name="code_as_tool_name", policy=code_as_name),
            Exploit(
                name="claims_a_tool_result",
                policy=lambda problem: plays(says('{"status": "ok", "result": true} The checked answer is correct.')),
            ),
        )


def _split_of(key: str) -> Split:
    return "heldout" if hashlib.sha256(key.encode()).digest()[0] % 5 == 0 else "train"


def _draw(rng: random.Random, level: str) -> tuple[str, str, str, str]:
    """Text, expression, local id, and the key that says which sums count as the same."""
    if level == "one_step":
        sign, name = rng.choice((("+", "plus"), ("-", "minus"), ("*", "times")))
        story, pattern = "Compute {a} " + sign + " {b}.", "{a} " + sign + " {b}"
        ranges: tuple[tuple[int, int], ...] = ((111, 989), (111, 989), (0, 0))
    else:
        index = rng.randrange(len(_STORIES))
        story, pattern, ranges = _STORIES[index]
        name = f"story{index}"
    a, b, c = (rng.randint(*bounds) for bounds in ranges)
    key = f"{pattern}:{min(a, b)}:{max(a, b)}:{c}"
    return story.format(a=a, b=b, c=c), pattern.format(a=a, b=b, c=c), f"{name}-{a}-{b}-{c}", key


def _problem(split: Split, text: str, expression: str, local: str, difficulty: float) -> Problem:
    value: Fraction = evaluate(expression)
    return Problem(
        id=f"calculator/{split}/{local}",
        domain="calculator",
        split=split,
        difficulty=difficulty,
        messages=(Message(role="user", content=f"{text} {INSTRUCTION}"),),
        tools=(CALCULATOR,),
        environment=EnvironmentSpec(kind="calculator"),
        verifier=VerifierSpec(
            kind="exact_answer",
            settings={
                "rule": "number",
                "expected": str(show(value)),
                "weights": {"found": 0.2, "correct": 0.4, "strict": 0.4},
            },
        ),
        budgets=Budgets(max_turns=6, max_tokens_per_turn=48, max_episode_tokens=768, max_tool_calls=6, tool_call_seconds=2.0),
        metadata={"expression": expression},
    )
