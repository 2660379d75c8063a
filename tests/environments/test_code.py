"""Rows become problems of the domain `code`; it is admitted on real boxes; real rows are tried where they are at hand."""

# ruff: noqa: E501  rows are one a line

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from data_contracts.errors import InputError
from data_contracts.protocols import SandboxBackend
from environments.admission import check_domain
from environments.domains.code_rows import problem_of, written
from environments.registry import domain, verifier
from environments.scripted import calls, plays, run_scripted, says

SHARED = Path(__file__).parents[3] / "shared" / "data"
HUMAN = {
    "task_id": "HumanEval/900",
    "prompt": 'def half(x):\n    """A helper."""\n    return x / 2\n\n\ndef double(x):\n    """Undo half."""\n',
    "entry_point": "double",
    "canonical_solution": "    return x * 2\n",
    "test": "def check(candidate):\n    assert candidate(half(6)) == 6\n    assert candidate(0.5) == 1\n",
}
LISTED = {
    "task_id": 11,
    "text": "Write a function to remove first and last occurrence of a given character from the string.",
    "code": "def remove_occ(s, ch):\n    i, j = s.find(ch), s.rfind(ch)\n    return s if i < 0 else s[:i] + s[i + 1 : j] + s[j + 1 :]\n",
    "test_list": ['assert remove_occ("hello","l") == "heo"', 'assert remove_occ("abcda","a") == "bcd"'],
    "test_setup_code": "",
    "challenge_test_list": ['assert remove_occ("PHP","P") == "H"'],
}
FILES = {
    "id": "shop",
    "prompt": "total() in shop.py ignores the discount. Repair it.",
    "entry_point": "total",
    "files": {"shop.py": "from prices import PRICES\n\n\ndef total(names, discount):\n    return sum(PRICES[n] for n in names)\n",
              "prices.py": "PRICES = {'a': 10, 'b': 20}\n"},
    "path": "shop.py",
    "solution": {"shop.py": "from prices import PRICES\n\n\ndef total(names, discount):\n    return sum(PRICES[n] for n in names) - discount\n"},
    "test": "from shop import total\n\n\ndef test_total():\n    assert total(['a', 'b'], 5) == 25\n    assert total([], 0) == 0\n",
    "limits": {"seconds": 10, "memory_mb": 128},
}  # fmt: skip
CASES = {
    "id": "area", "prompt": "Write area(w, h).", "entry_point": "area", "solution": "def area(w, h):\n    return w * h\n",
    "cases": [{"arguments": [2, 3], "expected": 6}, {"arguments": [[1], 2], "expected": [1, 1]}],
}  # fmt: skip
SUITE = {
    "id": "suite", "prompt": "Write one().", "entry_point": "one", "solution": "def one():\n    return 1\n",
    "test_files": {"test_one.py": "from solution import one\n\n\ndef test_one():\n    assert one() == 1\n"},
}  # fmt: skip
ROWS = {"human": HUMAN, "listed": LISTED, "files": FILES, "cases": CASES, "suite": SUITE}


@pytest.mark.parametrize("name", ROWS)
async def test_every_kind_of_row_is_solved_by_its_solution_only(bubblewrap_backend: SandboxBackend, name: str) -> None:
    code, made = domain("code"), problem_of(ROWS[name])
    verifier(made.verifier.kind).check(made)
    solved = await run_scripted(code, made, code.oracle(made), backend=bubblewrap_backend)
    assert solved.score == 1.0, solved.verdict
    assert (await run_scripted(code, made, code.noop(made), backend=bubblewrap_backend)).score == 0.0
    assert (await run_scripted(code, made, plays(says("")), backend=bubblewrap_backend)).score == 0.0


@pytest.mark.parametrize("name", ["human", "files"])
async def test_the_exploit_pack_earns_nothing_on_imported_rows(bubblewrap_backend: SandboxBackend, name: str) -> None:
    code, made = domain("code"), problem_of(ROWS[name])
    for exploit in code.exploits():
        episode = await run_scripted(code, made, exploit.policy(made), backend=bubblewrap_backend)
        assert episode.score == 0.0, (exploit.name, episode.verdict)


async def test_the_domain_is_admitted(bubblewrap_backend: SandboxBackend) -> None:
    report = await check_domain(domain("code"), bubblewrap_backend, problems=2)
    assert report.ok, report.table()
    assert report.trust == ("proxied",)


async def test_files_can_be_read_edited_and_run(bubblewrap_backend: SandboxBackend) -> None:
    code, made = domain("code"), problem_of(FILES)
    text = FILES["solution"]["shop.py"]  # type: ignore[index]
    policy = plays(
        calls("list_files", {}),
        calls("write_file", {"path": "try.py", "text": "from shop import total\nprint(total(['a'], 1))\n"}),
        calls("run", {"path": "try.py"}),
        calls("write_file", {"path": "shop.py", "text": text}),
        says("Done."),
    )
    episode = await run_scripted(code, made, policy, backend=bubblewrap_backend)
    replies = [message.content for message in episode.conversation if message.role == "tool"]
    assert "prices.py" in replies[0]
    assert '"result":"10"' in replies[2]
    assert episode.score == 1.0, episode.verdict


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("    return x * 2\n", "def f(x):\n    '''d'''\n    return x * 2\n"),
        ("Sure:\n```python\ndef f(x):\n    return 2\n```\nDone.", "def f(x):\n    '''d'''\n\n\ndef f(x):\n    return 2"),
        ("```\nx = 1\n```\n```python\ndef f(x):\n    return 2\n```\n```sh\nls\n```", "def f(x):\n    '''d'''\n\n\ndef f(x):\n    return 2"),
        ("```python\ndef f(x):\n    return 3", "def f(x):\n    '''d'''\n\n\ndef f(x):\n    return 3"),
        ("```python\nfrom __future__ import annotations\ndef f(x): pass\n```", "from __future__ import annotations\ndef f(x): pass"),
        ("", ""), (" \n", ""), ("```python\n```", ""),
    ],
)  # fmt: skip
def test_a_reply_becomes_a_file(reply: str, expected: str) -> None:
    assert written(reply, code="def f(x):\n    '''d'''\n", entry_point="f") == expected


def test_a_bare_signature_and_unknown_fields() -> None:
    made = problem_of(HUMAN | {"prompt": "def double(x):\n", "test": HUMAN["test"].replace("half(6)", "3"), "author": "me"})
    assert made.metadata["row"] == {"author": "me"}
    assert made.environment.settings["code"].endswith("    pass\n")
    listed = problem_of(LISTED)
    assert "`def remove_occ(s, ch)`" in listed.messages[0].content
    assert listed.verifier.settings["expected"] == ["test_0", "test_1"]
    assert listed.metadata["row"]["challenge_test_list"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompt": ""}, "prompt"), ({"prompt": None}, "prompt"), ({"prompt": 3}, "prompt"), ({"test": None}, "test"),
        ({"cases": [1]}, "cases"), ({"test": "def check(candidate"}, "test"), ({"test": "x = 1"}, "expected"),
        ({"entry_point": "not a name"}, "entry_point"), ({"limits": {"second": 3}}, "limits.second"),
        ({"limits": {"seconds": -1}}, "limits.seconds"), ({"limits": 3}, "limits"), ({"files": ["a"]}, "files"),
        ({"files": {"a.py": 3}}, "files.a.py"), ({"difficulty": "hard"}, "difficulty"), ({"budgets": {"turns": 3}}, "budgets"),
        ({"entry_point": None, "entrypoint": "double"}, "entrypoint"), ({"test": "def check(candidate):\n    candidate(1)\n"}, "test"),
    ],
)  # fmt: skip
def test_a_bad_row_names_its_field_and_the_remedy(change: dict[str, Any], field: str) -> None:
    row = {name: value for name, value in (HUMAN | change).items() if value is not None or name in change}
    with pytest.raises(InputError) as caught:
        problem_of({name: value for name, value in row.items() if value is not None})
    assert caught.value.field == field
    assert caught.value.remedy


def shipped_rows() -> list[Path]:
    found = [*SHARED.glob("**/*[hH]uman*[eE]val*.jsonl*"), *SHARED.glob("**/*mbpp*.jsonl*")]
    return sorted(path for path in found if path.is_file())


@pytest.mark.skipif(not shipped_rows(), reason="no rows of HumanEval's or MBPP's shape lie in shared/data")
async def test_real_rows_are_solved_by_their_solutions(bubblewrap_backend: SandboxBackend) -> None:
    code = domain("code")
    for path in shipped_rows():
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        for line in data.splitlines()[:20]:
            made = problem_of(json.loads(line))
            episode = await run_scripted(code, made, code.oracle(made), backend=bubblewrap_backend)
            assert episode.score == 1.0, (made.id, episode.verdict)
            assert (await run_scripted(code, made, code.noop(made), backend=bubblewrap_backend)).score == 0.0, made.id
