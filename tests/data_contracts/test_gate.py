from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from data_contracts import gate, quarantine
from data_contracts.errors import ContractError
from data_contracts.records import Episode, Failure, Problem, Score, VersionSpan
from data_contracts.suites import episodes as episodes_suite
from data_contracts.suites import problems as problems_suite
from data_contracts.suites import scores as scores_suite
from data_contracts.suites import train_batch as train_batch_suite
from data_contracts.suites.rules import Violation
from tests.data_contracts.samples import DictStore, batch, episode, infra_episode, problem, score

NAN = math.nan

BAD_EPISODES: dict[str, tuple[Callable[[Episode], Episode], str]] = {
    "duplicate id": (lambda e: replace(e, id="c/0/0/0"), "id"),
    "other problem in the group": (lambda e: replace(e, problem_id="arithmetic/train/99"), "group_id"),
    "member twice": (lambda e: replace(e, member=0), "group_id"),
    "unknown domain": (lambda e: replace(e, domain="poetry"), "domain"),
    "no tokens": (lambda e: replace(e, token_ids_T=(), loss_mask_T=(), logprobs_T=(), spans=(), turns=()), "token_ids_T"),
    "mask too short": (lambda e: replace(e, loss_mask_T=e.loss_mask_T[:-1]), "loss_mask_T"),
    "logprobs too long": (lambda e: replace(e, logprobs_T=(*e.logprobs_T, 0.0)), "loss_mask_T"),
    "mask on the prompt": (lambda e: replace(e, loss_mask_T=(1, *e.loss_mask_T[1:])), "loss_mask_T"),
    "mask on a tool result": (lambda e: replace(e, loss_mask_T=(0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1)), "loss_mask_T"),
    "mask of 2": (lambda e: replace(e, loss_mask_T=(*e.loss_mask_T[:-1], 2)), "loss_mask_T"),
    "no token of the policy": (lambda e: replace(e, loss_mask_T=(0,) * 11), "loss_mask_T"),
    "negative token id": (lambda e: replace(e, token_ids_T=(-1, *e.token_ids_T[1:])), "token_ids_T"),
    "NaN log-probability": (lambda e: replace(e, logprobs_T=(*e.logprobs_T[:-1], NAN)), "logprobs_T"),
    "infinite log-probability": (lambda e: replace(e, logprobs_T=(*e.logprobs_T[:-1], -math.inf)), "logprobs_T"),
    "positive log-probability": (lambda e: replace(e, logprobs_T=(*e.logprobs_T[:-1], 0.5)), "logprobs_T"),
    "log-probability off the mask": (lambda e: replace(e, logprobs_T=(-0.5, *e.logprobs_T[1:])), "logprobs_T"),
    "span missing": (lambda e: replace(e, spans=e.spans[:1]), "spans"),
    "version falls": (lambda e: replace(e, spans=(replace(e.spans[0], version=3), e.spans[1])), "spans"),
    "spans overlap": (lambda e: replace(e, spans=(*e.spans, VersionSpan(start=10, stop=11, version=0))), "spans"),
    "turns out of order": (lambda e: replace(e, turns=e.turns[::-1]), "turns"),
    "scored without verdict": (lambda e: replace(e, verdict=None), "outcome"),
    "infra failure with verdict": (lambda e: replace(e, outcome="infra_failure", stop_reason="infra"), "outcome"),
    "cause on a scored one": (lambda e: replace(e, failure=Failure(cause="node_lost", detail="")), "outcome"),
    "unknown outcome": (lambda e: replace(e, outcome="won"), "outcome"),
    "verdict above 1": (lambda e: replace(e, verdict=replace(e.verdict, score=1.5)), "verdict.score"),
    "NaN verdict": (lambda e: replace(e, verdict=replace(e.verdict, score=NAN)), "verdict"),
    "rewarded tampering": (lambda e: replace(e, verdict=replace(e.verdict, tampering="patched pytest")), "verdict"),
    "check twice": (lambda e: replace(e, verdict=replace(e.verdict, checks=e.verdict.checks * 2)), "verdict"),
    "tool without object": (lambda e: replace(e, tools=(replace(e.tools[0], parameters={}),)), "tools"),
    "artifact changed": (lambda e: replace(e, artifacts=(replace(e.artifacts[0], content=b"other"),)), "artifacts"),
}
BAD_SCORES: dict[str, tuple[Callable[[Score], Score | None], str]] = {
    "NaN reward": (lambda s: replace(s, reward=NAN), "reward"),
    "infinite reward": (lambda s: replace(s, reward=math.inf), "reward"),
    "reward out of range": (lambda s: replace(s, reward=1.5), "reward"),
    "NaN component": (lambda s: replace(s, components={"verdict": NAN}), "components"),
    "no component": (lambda s: replace(s, components={}), "components"),
    "episode twice": (lambda s: replace(s, episode_id="c/0/0/0"), "episode_id"),
    "unknown episode": (lambda s: replace(s, episode_id="nobody"), "episode_id"),
    "other group": (lambda s: replace(s, problem_id="other"), "episode_id"),
    "score missing": (lambda s: None, "reward"),
}
BAD_PROBLEMS: dict[str, tuple[Callable[[Problem], Problem], str]] = {
    "duplicate id": (lambda p: replace(p, id="arithmetic/train/0"), "id"),
    "id of another domain": (lambda p: replace(p, id="x/train/1"), "id"),
    "unknown domain": (lambda p: replace(p, domain="poetry", id="poetry/train/1"), "domain"),
    "NaN difficulty": (lambda p: replace(p, difficulty=NAN), "difficulty"),
    "no messages": (lambda p: replace(p, messages=()), "messages"),
    "empty prompt": (lambda p: replace(p, messages=(replace(p.messages[0], content=" "),)), "messages"),
    "ends with assistant": (lambda p: replace(p, messages=(replace(p.messages[0], role="assistant"),)), "messages"),
    "budget of 0": (lambda p: replace(p, budgets=replace(p.budgets, max_turns=0)), "budgets"),
    "no verifier": (lambda p: replace(p, verifier=replace(p.verifier, kind="")), "environment.kind"),
}


def corrupt(rows: list, change: Callable, at: int) -> list:
    return [row for row in (change(row) if i == at else row for i, row in enumerate(rows)) if row is not None]


def test_a_valid_batch_has_no_findings() -> None:
    episodes = [*batch(3), infra_episode(3)]
    scores = [score(e) for e in episodes if e.outcome != "infra_failure"]
    assert gate.check_group(episodes, domains=["arithmetic"]) == []
    assert gate.check_scores(scores, episodes=episodes) == []
    assert gate.check_train_batch(episodes, scores, max_tokens=11, vocabulary=200, versions=(0, 0)) == []
    assert gate.check_problems([problem(i) for i in range(3)], domains=["arithmetic"]) == []


def test_a_policy_cannot_break_the_contract_by_failing() -> None:
    """A box killed inside a turn, and a prompt that left no room: no verdict, tokens without a turn, no tokens at all."""
    failed = {"outcome": "policy_failure", "verdict": None}
    killed = episode(0, 0, turns=episode().turns[:1], stop_reason="box_killed", **failed)
    nothing = episode(
        0,
        1,
        token_ids_T=(),
        loss_mask_T=(),
        logprobs_T=(),
        prompt_length=0,
        spans=(),
        turns=(),
        stop_reason="box_killed",
        **failed,
    )
    no_room = episode(
        0,
        2,
        token_ids_T=(5, 6),
        loss_mask_T=(0, 0),
        logprobs_T=(0.0, 0.0),
        prompt_length=2,
        spans=(),
        turns=(),
        stop_reason="token_budget",
        **failed,
    )
    group = [killed, nothing, no_room]
    assert gate.check_group(group) == []
    assert gate.check_train_batch(group, [score(e, 0.0) for e in group], max_tokens=11, versions=(0, 0)) == []


@pytest.mark.parametrize("name", BAD_EPISODES)
def test_each_broken_episode_is_found_and_takes_its_group(name: str) -> None:
    change, field = BAD_EPISODES[name]
    found = gate.check_group(corrupt(batch(2), change, 1), domains=["arithmetic"])
    assert field in {violation.field for violation in found}
    assert {violation.group_id for violation in found} == {"c/0/group-0"}
    assert all(violation.remedy and violation.expected for violation in found)


@pytest.mark.parametrize("name", BAD_SCORES)
def test_each_broken_score_is_found(name: str) -> None:
    change, field = BAD_SCORES[name]
    episodes = batch(2)
    found = gate.check_scores(corrupt([score(e) for e in episodes], change, 1), episodes=episodes)
    assert field in {violation.field for violation in found}
    assert {violation.group_id for violation in found} == {"c/0/group-0"}


@pytest.mark.parametrize("name", BAD_PROBLEMS)
def test_each_broken_problem_is_found(name: str) -> None:
    change, field = BAD_PROBLEMS[name]
    found = gate.check_problems(corrupt([problem(i) for i in range(3)], change, 1), domains=["arithmetic"])
    assert field in {violation.field for violation in found}


@pytest.mark.parametrize(
    ("change", "settings", "field"),
    [
        ({"split": "heldout"}, {}, "split"),
        ({}, {"max_tokens": 10}, "token_ids_T"),
        ({}, {"vocabulary": 100}, "token_ids_T"),
        ({}, {"versions": (1, 2)}, "spans"),
    ],
)
def test_the_train_batch_refuses_what_may_not_be_trained(change: dict, settings: dict, field: str) -> None:
    episodes = [episode(0, 0, **change)]
    found = gate.check_train_batch(episodes, [score(e) for e in episodes], **settings)
    assert {violation.field for violation in found} == {field}


def test_great_expectations_and_the_cheap_check_find_the_same(tmp_path: Path) -> None:
    """One batch with every kind of damage, each in its own group: both readings of the rules agree finding by finding."""
    episodes = batch(len(BAD_EPISODES) + 1)
    for group, (change, _) in enumerate(BAD_EPISODES.values(), start=1):
        episodes[group * 4 + 1] = change(episodes[group * 4 + 1])
    scores = [score(e) for e in batch(len(BAD_SCORES) + 1)]
    for group, (change_score, _) in enumerate(BAD_SCORES.values(), start=1):
        scores[group * 4 + 1] = change_score(scores[group * 4 + 1])  # type: ignore[call-overload]
    scores = [s for s in scores if s is not None]
    problems = [problem(i) for i in range(len(BAD_PROBLEMS) + 1)]
    for i, (change_problem, _) in enumerate(BAD_PROBLEMS.values(), start=1):
        problems[i] = change_problem(problems[i])
    suites = [
        (episodes_suite.suite(domains=["arithmetic"]), episodes_suite.project(episodes)),
        (scores_suite.suite(), scores_suite.project(scores, episodes=batch(len(BAD_SCORES) + 1))),
        (train_batch_suite.suite(max_tokens=10, vocabulary=90), train_batch_suite.project(episodes, scores, versions=(1, 1))),
        (problems_suite.suite(domains=["arithmetic"]), problems_suite.project(problems)),
    ]
    report = gate.validate(tmp_path, run_name="iteration 000000", tables=suites)
    for (suite, columns), table in zip(suites, report.tables, strict=True):
        assert _keys(table.violations) == _keys(suite.violations(columns)), suite.table
        assert len(table.violations) > 8


def _keys(violations: object) -> list[tuple[object, ...]]:
    return sorted((v.row, v.row_id, v.field, v.found, v.expected) for v in violations)  # type: ignore[attr-defined]


def test_a_corrupted_group_is_quarantined_kept_and_named_in_data_docs(tmp_path: Path) -> None:
    episodes = batch(50, size=2)
    episodes[14] = replace(episodes[14], logprobs_T=(*episodes[14].logprobs_T[:-1], NAN))
    report = gate.check_batch(tmp_path, run_name="iteration 000003", episodes=episodes, scores=[score(e) for e in episodes])
    out = quarantine.decide(report.violations, groups={e.group_id for e in episodes})
    assert out.groups == {"c/0/group-7"}
    left = quarantine.without(episodes, out)
    assert len(left) == 98
    assert all(e.group_id != "c/0/group-7" for e in left)

    store = DictStore()
    (key,) = quarantine.keep(store, out, episodes, campaign="c", iteration=3)
    assert key.startswith("campaigns/c/quarantine/000003/")
    assert b"c/0/7/0" in store.get(key)
    assert b"logprobs_T" in store.get(key)

    assert Path(report.page).is_file()
    site = Path(report.page).parent
    pages = [page.read_text() for page in site.glob("validations/episodes/iteration 000003/*/*.html")]
    assert any("c/0/group-7" in page and "logprobs_finite" in page for page in pages)
    assert "c/0/group-8" not in "".join(pages)
    assert [table.table for table in report.tables] == ["episodes", "scores", "train_batch"]


def test_more_than_two_percent_of_groups_stop_the_iteration() -> None:
    episodes = batch(50, size=2)
    for at in (14, 60):
        episodes[at] = replace(episodes[at], logprobs_T=(*episodes[at].logprobs_T[:-1], NAN))
    with pytest.raises(ContractError) as caught:
        quarantine.decide(
            gate.check_group(episodes),
            groups={e.group_id for e in episodes},
            file="campaigns/c/iterations/000003/episodes.json",
        )
    assert str(caught.value) == (
        "campaigns/c/iterations/000003/episodes.json (episodes), row 15, field 'logprobs_T': 2 of 50 groups break "
        "their contract, more than 2%; the first: expected finite numbers. "
        "Check the engine: it returned broken numbers; restart it and resume"
    )


def test_an_empty_table_stops_the_iteration(tmp_path: Path) -> None:
    report = gate.check_batch(tmp_path, run_name="iteration 000000", episodes=[], scores=[])
    assert {v.table for v in report.violations} == {"episodes", "scores", "train_batch"}
    assert {v.table for v in gate.check_group([])} == {"episodes"}
    with pytest.raises(ContractError, match="the table as a whole breaks its contract: found 0 rows, expected at least 1"):
        quarantine.decide(report.violations, groups=[])


def test_a_row_of_an_unknown_group_stops_the_iteration() -> None:
    stray = Violation(table="scores", row=1, row_id="e", group_id="?", field="f", found="x", expected="y", remedy="z")
    with pytest.raises(ContractError, match=r"scores, row 1, field 'f': the row names group '\?'"):
        quarantine.decide([stray], groups=["g"])


def test_a_second_iteration_and_another_process_find_the_same_context(tmp_path: Path) -> None:
    """A new suite replaces the stored one, and pages of earlier iterations stay."""
    for high in (1.0, 1.5, 1.0):
        gate.check_batch(tmp_path, run_name="iteration 000000", scores=[score(episode())], episodes=[episode()], high=high)
    gate._CONTEXTS.clear()
    gate._CHECKPOINTS.clear()
    report = gate.check_batch(tmp_path, run_name="iteration 000001", scores=[score(episode(), 3.0)], high=2.0)
    assert [v.found for v in report.violations] == ["3.0"]
    index = Path(report.page).read_text()
    assert "iteration 000000" in index
    assert "iteration 000001" in index


def test_old_passing_runs_leave_data_docs_and_failing_ones_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "KEEP_RUNS", 2)
    for run, reward in enumerate((NAN, 1.0, 1.0, 1.0, 1.0)):
        report = gate.check_batch(tmp_path, run_name=f"iteration {run:06d}", scores=[score(episode(), reward)])
    site = Path(report.page).parent
    assert sorted(page.parts[-3] for page in site.glob("validations/scores/*/*/*.html")) == [
        "iteration 000000",
        "iteration 000003",
        "iteration 000004",
    ]
    assert "iteration 000002" not in Path(report.page).read_text()


def test_groups_that_fit_no_column_are_kept_as_json() -> None:
    store, bad = DictStore(), [episode(token_ids_T=(2**40,) * 11)]
    out = quarantine.Quarantine(reasons={bad[0].group_id: ("why",)})
    quarantine.keep(store, out, bad, campaign="c", iteration=0)
    assert any(key.endswith(".episodes.json") for key in store.objects)
