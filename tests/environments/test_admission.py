"""Admission must catch a domain that pays for nothing; each broken domain here breaks one promise."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from data_contracts.records import Message, Problem, Split, VerifierSpec
from environments.admission import AdmissionReport, check_domain
from environments.base import Exploit, Policy
from environments.domains.arithmetic import Arithmetic
from environments.registry import domain
from environments.scripted import calls, plays, random_policy, run_scripted, says
from tests.environments.application.jars import Jars
from tests.environments.application.jars import problem as jar_problem


def failed(report: AdmissionReport) -> set[str]:
    return {row.check for row in report.rows if not row.ok}


async def test_a_sound_domain_has_a_table_and_is_ok() -> None:
    report = await check_domain(domain("arithmetic"), None, problems=4)
    assert report.ok
    assert report.trust == ("cases",)
    assert "oracle" in report.table()
    assert "FAIL" not in report.table()
    checks = {row.check for row in report.rows}
    assert {"problems validate", "oracle", "no-op", "random", "the same twice"} <= checks
    assert len(checks) == 5 + len(domain("arithmetic").exploits())


async def test_an_oracle_that_is_wrong() -> None:
    class Wrong(Arithmetic):
        def oracle(self, problem: Problem) -> Policy:
            return plays(says("about 7"))

    report = await check_domain(Wrong(), None)
    assert failed(report) == {"oracle"}
    assert "about 7" in report.table()


async def test_a_noop_and_an_exploit_that_are_paid() -> None:
    class Generous(Arithmetic):
        def noop(self, problem: Problem) -> Policy:
            return self.oracle(problem)

        def exploits(self) -> Sequence[Exploit]:
            return (Exploit(name="half", policy=lambda p: plays(says(f"maybe {p.verifier.settings['expected']}"))),)

    assert failed(await check_domain(Generous(), None)) == {"no-op", "exploit half"}


async def test_problems_whose_verifier_asks_for_nothing() -> None:
    class Empty(Arithmetic):
        def problems(self, split: Split, *, seed: int, level: str = "default", **settings: Any) -> Iterator[Problem]:
            for problem in super().problems(split, seed=seed, level=level):
                spec = msgspec.structs.replace(
                    problem.verifier, settings={**problem.verifier.settings, "weights": {"found": 1.0}}
                )
                yield msgspec.structs.replace(problem, verifier=spec)

    report = await check_domain(Empty(), None, problems=1)
    assert "problems validate" in failed(report)
    assert "verifier.settings.weights" in report.table()


async def test_splits_that_share_prompts_and_bad_problems() -> None:
    class Leaky(Arithmetic):
        def problems(self, split: Split, *, seed: int, level: str = "default", **settings: Any) -> Iterator[Problem]:
            for problem in super().problems("train", seed=seed, level=level):
                yield msgspec.structs.replace(problem, split=split, id=problem.id.replace("/train/", f"/{split}/"))

    class Untyped(Arithmetic):
        def problems(self, split: Split, *, seed: int, level: str = "default", **settings: Any) -> Iterator[Problem]:
            for problem in super().problems(split, seed=seed, level=level):
                yield msgspec.structs.replace(problem, metadata={"pair": (1, 2)})

    report = await check_domain(Leaky(), None)
    assert failed(report) == {"problems validate"}
    assert "both splits" in report.table()
    assert "does not survive JSON" in (await check_domain(Untyped(), None)).table()


async def test_criteria_that_are_empty_or_pay_for_nothing_are_refused() -> None:
    """A no-op would pass the second kind, and the domain's floor would even allow it."""

    class Empty(Arithmetic):
        def problems(self, split: Split, *, seed: int, level: str = "default", **settings: Any) -> Iterator[Problem]:
            for problem in super().problems(split, seed=seed, level=level):
                yield msgspec.structs.replace(problem, verifier=VerifierSpec(kind="composite", settings={"parts": []}))

        def oracle(self, problem: Problem) -> Policy:
            return plays(says("5"))

        def exploits(self) -> Sequence[Exploit]:
            return ()

    class Idle(Jars):
        floor = 1.0

        def problems(self, split: Split, *, seed: int, level: str = "default", **settings: Any) -> Iterator[Problem]:
            for number in range(4):
                yield jar_problem(kind="state_comparison", calls=[], read_only=True, split=split, name=str(number))

        def oracle(self, problem: Problem) -> Policy:
            return self.noop(problem)

    report = await check_domain(Empty(), None)
    assert failed(report) >= {"problems validate", "oracle"}
    assert "everything would pass" in report.table()
    report = await check_domain(Idle(), None)
    assert failed(report) == {"problems validate", "no-op"}
    assert "an untouched database would pass" in report.table()


async def test_a_domain_of_an_application_is_admitted_with_its_own_tools() -> None:
    class Played(Jars):
        def oracle(self, problem: Problem) -> Policy:
            (write,) = problem.verifier.settings["parts"][0]["settings"]["calls"]
            return plays(calls("look", {"jar": "red"}), calls(write["name"], write["arguments"]), says("done"))

        def exploits(self) -> Sequence[Exploit]:
            def without_looking(problem: Problem) -> Policy:
                (write,) = problem.verifier.settings["parts"][0]["settings"]["calls"]
                return plays(calls(write["name"], write["arguments"]), says("done"))

            return (Exploit(name="without_looking", policy=without_looking),)

    report = await check_domain(Played(), None)
    assert report.ok, report.table()


async def test_scripted_episodes_have_the_same_three_ends_as_rollouts() -> None:
    calculator = domain("calculator")
    problem = next(calculator.problems("train", seed=0))
    answered = await run_scripted(calculator, problem, calculator.oracle(problem), backend=None)
    assert (answered.stop_reason, answered.outcome, answered.score) == ("answered", "scored", 1.0)
    looping = await run_scripted(calculator, problem, plays(calls("calculator", {"expression": "1+1"})), backend=None)
    assert (looping.stop_reason, looping.outcome, looping.verdict, looping.score) == (
        "turn_budget",
        "policy_failure",
        None,
        0.0,
    )
    assert sum(m.role == "assistant" for m in looping.conversation) == problem.budgets.max_turns


def test_the_random_policy_repeats_itself_by_seed() -> None:
    problem = next(domain("code_repair").problems("train", seed=0))

    def script(seed: int) -> list[Message]:
        policy, conversation = random_policy(problem, seed=seed), list(problem.messages)
        for _ in range(4):
            conversation.append(policy(conversation))
        return conversation

    assert script(1) == script(1)
    assert script(1) != script(2)
