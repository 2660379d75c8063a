import asyncio
import re
import time
from collections import Counter
from itertools import islice

import pytest

from data_contracts.errors import ConfigError
from data_contracts.protocols import SandboxBackend, to_json
from data_contracts.records import Problem, Split
from environments.admission import check_domain
from environments.domains.arithmetic import Arithmetic
from environments.domains.code_repair import reproducible
from environments.domains.echo import Echo
from environments.registry import domain, domain_names
from environments.scripted import calls, plays, run_scripted, says

NAMES = ("arithmetic", "calculator", "code", "code_repair", "echo", "orders")
LEVELS = [(name, level) for name in NAMES for level in domain(name).levels if level != "imported"]
"""What a company imports is not here; tests/environments/test_code.py has rows of its own."""


def stream(name: str, split: Split, *, seed: int = 0, level: str = "default", count: int = 300) -> list[Problem]:
    return list(islice(domain(name).problems(split, seed=seed, level=level), count))


@pytest.mark.parametrize(("name", "level"), LEVELS)
def test_streams_are_distinct_repeatable_and_differ_by_seed(name: str, level: str) -> None:
    first = stream(name, "train", level=level)
    assert len({p.id for p in first}) == len(first) == len({p.messages for p in first})
    assert [to_json(p) for p in first] == [to_json(p) for p in stream(name, "train", level=level)]
    assert [p.id for p in first] != [p.id for p in stream(name, "train", seed=1, level=level)]


@pytest.mark.parametrize(("name", "level"), LEVELS)
def test_no_seed_carries_a_heldout_problem_into_training(name: str, level: str) -> None:
    def key(problem: Problem) -> object:
        text = problem.messages[-1].content
        if name == "code_repair":
            return text
        if name == "orders":
            return problem.environment.settings["start"]["seed"], text
        found = re.findall("[0-9]+", text)  # the order of the first two numbers makes no new problem
        return (re.sub("[0-9]+", "#", text), tuple(sorted(found[:2])), tuple(found[2:]))

    count = 200 if name == "orders" else 2_000  # a shop belongs to one split by the digest of its seed
    train = {key(p) for seed in range(3) for p in stream(name, "train", seed=seed, level=level, count=count)}
    heldout = {key(p) for seed in range(3) for p in stream(name, "heldout", seed=seed + 9, level=level, count=count)}
    assert train
    assert heldout
    assert not train & heldout


def test_the_demo_gets_as_many_heldout_problems_as_it_asks_for() -> None:
    assert len(stream("arithmetic", "heldout", count=64)) == 64
    for name in ("calculator", "code_repair", "echo", "orders"):
        assert len(stream(name, "heldout", count=16)) == 16
    assert len(stream("code_repair", "train", count=1_000)) >= 100


def test_code_repair_splits_by_function_and_rounds_over_functions() -> None:
    train, heldout = stream("code_repair", "train"), stream("code_repair", "heldout")
    assert not {p.metadata["function"] for p in train} & {p.metadata["function"] for p in heldout}
    assert len({p.metadata["function"] for p in train} | {p.metadata["function"] for p in heldout}) >= 25
    assert len({p.metadata["function"] for p in heldout[:9]}) == 9


def test_arithmetic_default_is_two_digit_addition_within_sixteen_tokens() -> None:
    for problem in stream("arithmetic", "train"):
        a, b = map(int, re.findall("[0-9]+", problem.messages[0].content))
        assert 10 <= a <= 99
        assert 10 <= b <= 99
        assert problem.verifier.settings["expected"] == str(a + b)
        assert problem.budgets.max_tokens_per_turn == 16
        assert problem.budgets.max_turns == 1


def test_the_best_constant_answer_to_echo_scores_below_the_line() -> None:
    for split in ("train", "heldout"):
        problems = stream("echo", split)  # type: ignore[arg-type]
        letters = Counter(p.verifier.settings["expected"] for p in problems)
        weights = problems[0].verifier.settings["weights"]
        best = max(letters.values()) / len(problems) * weights["correct"] + weights["valid"]
        assert best <= 0.3
        assert problems[0].budgets.max_tokens_per_turn == 1
        assert len(problems[0].messages[0].content) == 3
        assert sorted(p.verifier.settings["expected"] for p in problems[:8]) == list("abcdefgh")


@pytest.mark.parametrize(("reply", "score"), [("right", 1.0), ("other", 0.15), ("z", 0.0), ("", 0.0)])
async def test_echo_gives_part_of_the_credit_for_any_letter(reply: str, score: float) -> None:
    problem = stream("echo", "train", count=1)[0]
    right = problem.verifier.settings["expected"]
    said = {"right": right, "other": "a" if right != "a" else "b"}.get(reply, reply)
    assert (await run_scripted(Echo(), problem, plays(says(said)), backend=None)).score == pytest.approx(score)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("arithmetic", {"level": "hard"}),
        ("arithmetic", {"digits": 2}),
        ("calculator", {"level": "x"}),
        ("code_repair", {"bugs": 2}),
        ("orders", {"level": "x"}),
        ("orders", {"customers": 2}),
        ("echo", {"letters": 3, "partial": 0.2}),
        ("echo", {"letters": 99}),
        ("echo", {"noise": 1}),
    ],
)
def test_unknown_levels_and_settings_are_refused(name: str, settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        next(domain(name).problems("train", seed=0, **settings))  # type: ignore[arg-type]


def test_generators_are_quick_enough_for_curation() -> None:
    started = time.monotonic()
    for name, level in LEVELS:
        stream(name, "train", seed=5, level=level, count=64)
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(("name", "level"), [pair for pair in LEVELS if not pair[0].startswith("code")])
async def test_domains_without_a_box_are_admitted(name: str, level: str) -> None:
    count = 16 if name != "orders" else 14 if level == "default" else 4  # an order desk has 13 kinds of requests
    report = await check_domain(domain(name), None, problems=count, level=level)
    assert report.ok, report.table()


async def test_code_repair_is_admitted(bubblewrap_backend: SandboxBackend) -> None:
    report = await check_domain(domain("code_repair"), bubblewrap_backend, problems=2)
    assert report.ok, report.table()
    assert report.trust == ("cases",)


async def test_every_function_is_repaired_by_the_oracle_and_broken_without_it(bubblewrap_backend: SandboxBackend) -> None:
    code_repair = domain("code_repair")
    problems = {p.metadata["function"]: p for split in ("train", "heldout") for p in stream("code_repair", split)}  # type: ignore[arg-type]
    assert len(problems) >= 25

    async def scores(problem: Problem) -> tuple[float, float]:
        oracle = await run_scripted(code_repair, problem, code_repair.oracle(problem), backend=bubblewrap_backend)
        noop = await run_scripted(code_repair, problem, code_repair.noop(problem), backend=bubblewrap_backend)
        return oracle.score, noop.score

    found = dict(zip(problems, await asyncio.gather(*map(scores, problems.values())), strict=True))
    assert {name: pair for name, pair in found.items() if pair != (1.0, 0.0)} == {}


async def test_code_repair_policy_sees_its_errors_and_recovers(bubblewrap_backend: SandboxBackend) -> None:
    code_repair = domain("code_repair")
    problem = stream("code_repair", "train", count=1)[0]
    episode = await run_scripted(code_repair, problem, code_repair.recovering(problem), backend=bubblewrap_backend)  # type: ignore[attr-defined]
    replies = [m.content for m in episode.conversation if m.role == "tool"]
    assert "not valid JSON" in replies[0]
    assert "cannot read missing.py" in replies[1]
    assert "SyntaxError" in replies[3]
    assert "passed" in replies[5]
    assert episode.score == 1.0
    assert episode.collected is not None
    assert [a.name for a in episode.collected.artifacts] == ["solution.py"]


async def test_what_a_policy_reads_is_the_same_every_time(bubblewrap_backend: SandboxBackend) -> None:
    code_repair, problem = domain("code_repair"), stream("code_repair", "train", count=1)[0]
    name = problem.metadata["function"]
    script = [
        calls("run_tests", {}),
        calls("list_files", {}),
        calls("write_file", {"path": "solution.py", "text": f"def {name}(*a): return object(), set('abcdef')\n"}),
        calls("run_tests", {}),
        says("done"),
    ]
    first, second = [await run_scripted(code_repair, problem, plays(*script), backend=bubblewrap_backend) for _ in range(2)]
    assert first.conversation == second.conversation
    assert first.verdict == second.verdict


def test_reports_lose_timings_addresses_and_rulers_and_stay_bounded() -> None:
    report = "====== FAILURES ======\n<object at 0x7f12ab34cd56>\n....   [100%]\n4 passed in 0.03s"
    assert reproducible(report) == "== FAILURES ==\n<object at 0x0>\n....\n4 passed"
    assert reproducible("1 failed in 75.20s (0:01:15)") == "1 failed"
    assert len(reproducible("x" * 10_000 + "the end")) < 1_300
    assert reproducible("x" * 10_000 + "the end").endswith("the end")


def test_a_report_of_blanks_does_not_stop_the_event_loop() -> None:
    began = time.monotonic()
    for hostile in (" " * 131_072, " [" * 65_536, " [" + " " * 131_072, " in " + "1" * 131_072, "=" * 131_072):
        reproducible(hostile)
    assert time.monotonic() - began < 1.0


async def test_file_tools_stay_inside_their_folder(bubblewrap_backend: SandboxBackend) -> None:
    code_repair, problem = domain("code_repair"), stream("code_repair", "train", count=1)[0]
    script = [
        calls("list_files", {}),
        calls("write_file", {"path": "../escape.py", "text": "x"}),
        calls("write_file", {"path": "/etc/escape", "text": "x"}),
        calls("write_file", {"path": "a/../../b", "text": "x"}),
        calls("write_file", {"path": "big.py", "text": "x" * 20_000}),
        calls("replace", {"path": "solution.py", "old": "no such text", "new": ""}),
        calls("read_file", {"path": "solution.py"}),
        says("done"),
    ]
    episode = await run_scripted(code_repair, problem, plays(*script), backend=bubblewrap_backend)
    replies = [m.content for m in episode.conversation if m.role == "tool"]
    assert "solution.py" in replies[0]
    assert all('"error"' in reply for reply in replies[1:6]), replies
    assert f"def {problem.metadata['function']}" in replies[6]


def test_arithmetic_never_poses_what_can_be_copied_from_the_question() -> None:
    for level in Arithmetic.levels:
        for problem in stream("arithmetic", "train", level=level):
            assert problem.verifier.settings["expected"] not in re.findall("[0-9]+", problem.messages[0].content)


def test_all_built_in_domains_are_covered_here() -> None:
    assert {name for name, _ in LEVELS} == set(domain_names())
