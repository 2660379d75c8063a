"""Stored episodes graded again: equal bytes when nothing changed, and what changed or is missing told episode by episode."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from data_contracts.config import CampaignConfig, DomainConfig, RewardConfig
from data_contracts.errors import ConfigError, InfraError, InputError
from data_contracts.ledger_events import Created, Curated, Published, Sealed
from data_contracts.protocols import SandboxBackend
from data_contracts.records import Problem, ProblemsRef, PublishResult
from data_contracts.tables import digest, read_episodes, write_problems
from flows import cli
from infra.ledger_log import LedgerLog, this_process
from infra.store import LocalStore
from tasks.grade import verify
from tasks.group_pool import LocalPool
from tasks.regrade import Change, Regraded, batches, read_change, regrade, stored, what_is_missing
from tests.tasks.test_rollout import BASE, few, roomy, run, worker


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory, bubblewrap_backend: SandboxBackend) -> LocalStore:
    """One sealed iteration of real episodes: three domains, two episodes a problem, and problems that are out of tokens."""
    store = LocalStore(tmp_path_factory.mktemp("store"))
    short = msgspec.structs.replace(few("calculator", 1)[0], budgets=few("calculator", 1)[0].budgets)
    short = msgspec.structs.replace(short, budgets=msgspec.structs.replace(short.budgets, max_turns=1))
    problems = [*roomy(few("arithmetic", 1) + few("code_repair", 1)), *roomy([short]), *roomy(few("orders", 1))]
    pool = LocalPool()
    sealed = run(store, pool, problems, worker(store, "oracle"))
    pool.close()
    key = "campaigns/c/iterations/000000/problems.jsonl"
    curated = ProblemsRef(uri=key, sha256=digest(write_problems(problems)), rows=len(problems))
    log = LedgerLog(store, "c")
    config = CampaignConfig(domains=[DomainConfig(name="arithmetic")]).model_dump(mode="json")
    assert log.create(Created(campaign="c", config=config, base=BASE))
    with log.lease(this_process("test")):
        log.append(Curated(iteration=0, problems=curated))
        log.append(Published(version=0, result=PublishResult(version=0, proofs=())))
        log.append(Sealed(iteration=0, episodes=sealed))
    return store


async def again(store: LocalStore, backend: SandboxBackend, change: Change | None = None, name: str = "c") -> list[Regraded]:
    found = batches(store, LedgerLog(store, "c").state(), name)
    groups = regrade(found, store=store, reward=RewardConfig(), backend=backend, concurrency=4, change=change)
    return [row async for group in groups for row in group]


def stored_problem(store: LocalStore, domain: str) -> Problem:
    batch = batches(store, LedgerLog(store, "c").state(), "c/0")[0]
    return next(problem for problem in batch.problems.values() if problem.domain == domain)


async def test_nothing_changed_and_every_verdict_has_the_same_bytes(
    campaign: LocalStore, bubblewrap_backend: SandboxBackend
) -> None:
    for name in ("c", "c/0", "c/iterations/000000"):
        rows = await again(campaign, bubblewrap_backend, name=name)
        graded = [row for row in rows if row.result != "kept"]
        assert len(graded) == 6
        assert {(row.result, row.old_reward, row.new_reward, row.why) for row in graded} == {("same", 1.0, 1.0, "")}
        kept = [row for row in rows if row.result == "kept"]
        assert [(row.old_reward, row.new_reward) for row in kept] == [(0.0, 0.0)] * 2
        assert all("policy_failure (turn_budget); nothing was collected" in row.why for row in kept)


async def test_a_corrected_problem_changes_its_rewards(campaign: LocalStore, bubblewrap_backend: SandboxBackend) -> None:
    problem = stored_problem(campaign, "arithmetic")
    settings = {**problem.verifier.settings, "expected": "12345"}
    fixed = msgspec.structs.replace(problem, verifier=msgspec.structs.replace(problem.verifier, settings=settings))
    rows = await again(campaign, bubblewrap_backend, Change(problems={problem.id: fixed}))
    changed = [row for row in rows if row.result == "changed"]
    assert [(row.problem_id, row.old_reward, row.new_reward) for row in changed] == [(problem.id, 1.0, 0.0)] * 2
    assert "correct fails" in changed[0].why


async def test_episodes_of_a_stateful_service_are_replayed_from_their_log(
    campaign: LocalStore, bubblewrap_backend: SandboxBackend
) -> None:
    problem = stored_problem(campaign, "orders")
    parts = problem.verifier.settings["parts"]

    async def results(changed: Problem) -> list[Regraded]:
        rows = await again(campaign, bubblewrap_backend, Change(problems={problem.id: changed}))
        return [row for row in rows if row.problem_id == problem.id]

    def verified(parts: list[dict[str, Any]]) -> Problem:
        return msgspec.structs.replace(problem, verifier=msgspec.structs.replace(problem.verifier, settings={"parts": parts}))

    assert {row.result for row in await results(verified(parts))} == {"same"}
    order = problem.metadata["orders"][0]
    another = [{"name": "change_address", "arguments": {"order_id": order, "address": "Mill Lane 1"}}]
    (row, *_) = await results(verified([{**parts[0], "settings": {"calls": another}}, *parts[1:]]))
    assert (row.result, row.old_reward, row.new_reward) == ("changed", 1.0, 0.0)
    assert "state/orders fails: id" in row.why
    (row, *_) = await results(verified([parts[1]]))
    assert (row.result, row.new_reward) == ("not graded", None)
    assert "all parts hold when nothing is done" in row.why
    start = {"seed": problem.environment.settings["start"]["seed"], "digest": "of another version"}
    environment = msgspec.structs.replace(problem.environment, settings={"start": start})
    (row, *_) = await results(msgspec.structs.replace(problem, environment=environment))
    assert row.result == "not graded"
    assert "The application has changed since" in row.why


def test_a_log_that_does_not_lead_to_the_stored_state_is_nobodys_score(campaign: LocalStore) -> None:
    batch = batches(campaign, LedgerLog(campaign, "c").state(), "c/0")[0]
    episode = next(found for found in read_episodes(campaign, batch.episodes) if found.domain == "orders")
    problem = batch.problems[episode.problem_id]
    state = {**episode.final_state, "calls": episode.final_state["calls"][1:]}
    changed = msgspec.structs.replace(episode, final_state=state)
    assert not what_is_missing(changed, problem, problem)
    with pytest.raises(InfraError, match=r"verifier_error: .* do not lead to the state|the log of"):
        asyncio.run(verify(problem, stored(changed), acquire=None, seconds=10))  # type: ignore[arg-type]
    changed = msgspec.structs.replace(episode, final_state={"answer": "x", "calls": []})
    assert "final_state.seal is not stored" in what_is_missing(changed, problem, problem)


async def test_what_grading_needs_and_was_not_stored_is_named(
    campaign: LocalStore, bubblewrap_backend: SandboxBackend, tmp_path: Path
) -> None:
    file = tmp_path / "verifier.json"
    file.write_text(json.dumps({"collect": ["solution.py", "notes.txt"]}))
    rows = await again(campaign, bubblewrap_backend, read_change(str(file), {}))
    missing = [row for row in rows if row.problem_id.startswith("code_repair")]
    assert {row.result for row in missing} == {"not graded"}
    assert all("'notes.txt' was not collected when the episode ran" in row.why for row in missing)
    assert {row.new_reward for row in missing} == {None}
    rows = await again(campaign, bubblewrap_backend, read_change("unit_tests", {}))
    assert all("unit_tests cannot grade" in row.why for row in rows if row.result == "not graded")
    assert not [row for row in rows if row.result in ("same", "changed")]


def test_stored_bytes_and_state_are_checked(campaign: LocalStore) -> None:
    batch = batches(campaign, LedgerLog(campaign, "c").state(), "c/0")[0]
    for episode in read_episodes(campaign, batch.episodes):
        problem = batch.problems[episode.problem_id]
        if episode.domain == "code_repair":
            bad = msgspec.structs.replace(episode.artifacts[0], content=b"other")
            changed = msgspec.structs.replace(episode, artifacts=(bad,))
            assert "not those of its digest" in what_is_missing(changed, problem, problem)
        elif episode.domain == "arithmetic":
            changed = msgspec.structs.replace(episode, final_state={})
            assert "final_state.answer is not stored" in what_is_missing(changed, problem, problem)


@pytest.mark.parametrize("name", ["c/7", "c/evaluations/0", "c/groups/0", "c/x", "c/iterations/0/0"])
def test_a_batch_that_is_not_there_names_those_that_are(campaign: LocalStore, name: str) -> None:
    with pytest.raises(InputError, match="Its sealed"):
        batches(campaign, LedgerLog(campaign, "c").state(), name)


def test_a_verifier_that_does_not_exist_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'unit_tests'"):
        read_change("unit_test", {})
    with pytest.raises(InputError, match="cannot be read"):
        read_change(str(tmp_path / "none.json"), {})
    (tmp_path / "v.json").write_text('{"rule": "number"}')
    with pytest.raises(InputError, match="is no field of a verifier"):
        read_change(str(tmp_path / "v.json"), {})


def test_the_command_prints_what_changed_and_exits_with_zero(
    campaign: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BESSEMER_HOME", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        cli.main(["regrade", "c", "--store", campaign.root, "--json"])
    assert not ended.value.code
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["result"] for line in lines].count("same") == 6
    assert set(lines[0]) == {"episode_id", "problem_id", "result", "old_reward", "new_reward", "why"}
    with pytest.raises(SystemExit) as ended:
        cli.main(["regrade", "c/0", "--store", campaign.root, "--verifier", "unit_tests"])
    assert not ended.value.code
    assert "0 same, 0 changed, 2 kept, 6 not graded" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        cli.main(["regrade", "absent", "--store", campaign.root])
    assert ended.value.code == 2
