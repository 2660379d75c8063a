"""Smoke tests for a randomly initialised model: answer with the letter shown, one token.

The prompt is two digits of noise and a letter ("47c"); the noise makes problems distinct and keeps the splits apart (noise
00-79 trains, 80-99 is held out). Letters come in shuffled rounds, so that every stretch of `letters` problems shows each
letter once and the best constant answer scores exactly 1/letters + partial (1 - 1/letters): 0.256 by default. Settings
that would lift that above 0.3 are refused, so a reward above it proves that the policy reads its prompt.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator, Sequence
from typing import Any

from data_contracts.errors import ConfigError
from data_contracts.records import Budgets, EnvironmentSpec, Message, Problem, Split, VerifierSpec
from environments.base import Domain, Environment, EnvironmentContext, Exploit, Policy
from environments.scripted import plays, says
from environments.single_turn import SingleTurn

NOISE = {"train": range(80), "heldout": range(80, 100)}


class Echo(Domain):
    name = "echo"
    family = "smoke_test"
    summary = "smoke test: answer with the letter shown, one token"
    floor = 0.3

    def problems(
        self,
        split: Split,
        *,
        seed: int,
        level: str = "default",
        letters: int = 8,
        partial: float = 0.15,
        **settings: Any,
    ) -> Iterator[Problem]:
        """Finite: `letters` x 80 train and `letters` x 20 held-out problems. `partial` is the credit for another letter."""
        if level != "default" or settings or not 2 <= letters <= 26:
            raise ConfigError(
                f"echo knows level 'default' and settings letters (2..26), partial; got level '{level}', letters {letters}, "
                f"{sorted(settings)}",
                field="level",
            )
        if 1 / letters + partial * (1 - 1 / letters) > 0.3 + 1e-12:
            raise ConfigError(
                f"with {letters} letters and partial credit {partial} a constant answer would score above 0.3",
                field="settings",
                remedy="Use more letters or less partial credit",
            )
        choices = list(string.ascii_lowercase[:letters])
        rng = random.Random(f"echo:{split}:{seed}")
        noise = {choice: rng.sample(NOISE[split], len(NOISE[split])) for choice in choices}
        for round_number in range(len(NOISE[split])):
            for choice in rng.sample(choices, len(choices)):
                yield _problem(split, choice, noise[choice][round_number], choices, partial)

    def environment(self, problem: Problem, context: EnvironmentContext) -> Environment:
        return SingleTurn(problem, context)

    def oracle(self, problem: Problem) -> Policy:
        return plays(says(str(problem.verifier.settings["expected"])))

    def exploits(self) -> Sequence[Exploit]:
        def every_letter(problem: Problem) -> Policy:
            return plays(says("".join(problem.verifier.settings["choices"])))

        return (
            Exploit(name="empty_answer", policy=lambda problem: plays(says(""))),
            Exploit(name="every_letter", policy=every_letter),
            Exploit(name="whole_prompt", policy=lambda problem: plays(says(problem.messages[-1].content))),
            Exploit(name="look_alike_letter", policy=lambda problem: plays(says("\u0430"))),
        )


def _problem(split: Split, letter: str, noise: int, choices: list[str], partial: float) -> Problem:
    return Problem(
        id=f"echo/{split}/{noise:02d}{letter}",
        domain="echo",
        split=split,
        difficulty=0.0,
        messages=(Message(role="user", content=f"{noise:02d}{letter}"),),
        environment=EnvironmentSpec(kind="echo"),
        verifier=VerifierSpec(
            kind="exact_answer",
            settings={
                "rule": "choice",
                "expected": letter,
                "choices": choices,
                "weights": {"correct": round(1 - partial, 9), "valid": partial},
            },
        ),
        budgets=Budgets(max_turns=1, max_tokens_per_turn=1, max_episode_tokens=64, max_tool_calls=0),
    )
