"""The contract of graded groups: token arrays that line up, masks only on what the policy wrote, spans, turns, verdicts.

An `infra_failure` has no verdict and may have stopped anywhere, so the rules on tokens and turns pass over it. A
`policy_failure` may have stopped inside a turn (it killed its box) or before its first token: a policy must never be able to
break a contract, because a quarantined group is a group without a bad score. The projection is plain Python over tuples: about
80 microseconds for an episode of 500 tokens.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, get_args

from data_contracts.records import Episode, Outcome, Split, StopReason
from data_contracts.suites.rules import Columns, Rule, Suite, between, holds, one_of, unique

POSITIVE_LOGPROB = 1e-4
"""A log-probability may exceed 0 by rounding only."""

_STAGE = "The rollout stage wrote a wrong episode; run `bessemer show` on it"
_ENGINE = "Check the engine: it returned broken numbers; restart it and resume"


def suite(*, domains: Collection[str] = ()) -> Suite:
    """`domains`: the campaign's domains; empty leaves that rule out."""
    rules: list[Rule] = [
        unique("row_id", field="id", expected="an id that no other episode has", remedy=_STAGE),
        holds(
            "group_agrees",
            field="group_id",
            expected="one problem, campaign and iteration in a group, every member once",
            remedy=_STAGE,
        ),
        one_of("outcome", get_args(Outcome), remedy=_STAGE),
        one_of("stop_reason", get_args(StopReason), remedy=_STAGE),
        one_of("split", get_args(Split), remedy=_STAGE),
        holds(
            "outcome_fits",
            field="outcome",
            expected="infra_failure exactly when stop_reason is 'infra', with a cause and no verdict; scored with a verdict",
            remedy=_STAGE,
        ),
        between("tokens", 1, None, field="token_ids_T", expected="at least 1 token", remedy=_STAGE),
        holds("lengths_agree", field="loss_mask_T", expected="ids, mask and log-probabilities of one length", remedy=_STAGE),
        between("token_min", 0, None, field="token_ids_T", expected="ids of at least 0", remedy=_ENGINE),
        between(
            "policy_tokens", 1, None, field="loss_mask_T", expected="at least 1 token that the policy wrote", remedy=_STAGE
        ),
        holds(
            "mask_fits",
            field="loss_mask_T",
            expected="0 or 1, 0 over the prompt, and 1 exactly on the tokens of the turns",
            remedy=_STAGE,
        ),
        holds("logprobs_finite", field="logprobs_T", expected="finite numbers", remedy=_ENGINE),
        between(
            "logprob_max", None, POSITIVE_LOGPROB, field="logprobs_T", expected="log-probabilities of at most 0", remedy=_ENGINE
        ),
        holds("logprobs_masked", field="logprobs_T", expected="0.0 wherever the mask is 0", remedy=_STAGE),
        holds(
            "spans_fit",
            field="spans",
            expected="ordered spans without overlap, versions that never fall, every token of the policy covered",
            remedy=_STAGE,
        ),
        holds("turns_ordered", field="turns", expected="turns numbered from 0, in order, inside the episode", remedy=_STAGE),
        between("verdict_score", 0, 1, field="verdict.score", expected="a score from 0 to 1", remedy="Fix the verifier"),
        holds(
            "verdict_fits",
            field="verdict",
            expected="finite numbers, every check id once, score 0 where tampering was found",
            remedy="Fix the verifier",
        ),
        holds(
            "tools_are_objects",
            field="tools",
            expected="tools with distinct names and a JSON schema of type object",
            remedy="Fix the domain's tool schemas",
        ),
        holds("artifacts_fit", field="artifacts", expected="content that has the named size and sha256", remedy=_STAGE),
    ]
    if domains:
        rules.append(one_of("domain", tuple(sorted(domains)), remedy="Name the domain in campaign.domains"))
    return Suite(table="episodes", rules=tuple(rules))


def project(episodes: Sequence[Episode]) -> Columns:
    """One row of scalars an episode."""
    heads: dict[str, tuple[Any, ...]] = {}
    members = Counter((e.group_id, e.member) for e in episodes)
    columns: Columns = {}
    for row, episode in enumerate(episodes, start=1):
        head = (episode.problem_id, episode.domain, episode.split, episode.campaign, episode.iteration)
        agrees = heads.setdefault(episode.group_id, head) == head and members[episode.group_id, episode.member] == 1
        cells = {
            "row": row,
            "row_id": episode.id,
            "group_id": episode.group_id,
            "domain": episode.domain,
            "split": episode.split,
            "outcome": episode.outcome,
            "stop_reason": episode.stop_reason,
            "group_agrees": agrees,
            "outcome_fits": _outcome_fits(episode),
            **_tokens(episode),
            **_verdict(episode),
            "tools_are_objects": len({t.name for t in episode.tools}) == len(episode.tools)
            and all(t.parameters.get("type") == "object" for t in episode.tools),
            "artifacts_fit": all(
                len(a.content) == a.size and hashlib.sha256(a.content).hexdigest() == a.sha256 for a in episode.artifacts
            ),
        }
        for name, cell in cells.items():
            columns.setdefault(name, []).append(cell)
    return columns or {"row": [], "row_id": [], "group_id": [], **{rule.column: [] for rule in suite(domains=("x",)).rules}}


def _outcome_fits(e: Episode) -> bool:
    if e.outcome == "infra_failure":
        return e.stop_reason == "infra" and e.failure is not None and e.verdict is None
    if e.outcome == "scored" and e.verdict is None:
        return False
    return e.stop_reason != "infra" and e.failure is None


def _tokens(e: Episode) -> dict[str, Any]:
    """Facts of the token axis; an infra_failure may have stopped anywhere, so most of them are left empty for it."""
    ids, mask, logprobs = e.token_ids_T, e.loss_mask_T, e.logprobs_T
    total, written = len(ids), sum(mask)
    infra = e.outcome == "infra_failure"
    agree = len(mask) == total == len(logprobs)
    finite = all(map(math.isfinite, logprobs))
    return {
        "tokens": total if e.outcome == "scored" else None,
        "token_min": min(ids, default=None),
        "policy_tokens": written if e.outcome == "scored" else None,
        "lengths_agree": agree,
        "mask_fits": None if infra else _mask_fits(e, written),
        "logprobs_finite": finite,
        "logprob_max": max(logprobs, default=None) if finite else None,
        "logprobs_masked": not any(p for p, m in zip(logprobs, mask, strict=True) if not m) if agree else None,
        "spans_fit": None if infra else _spans_fit(e, written),
        "turns_ordered": _turns_ordered(e),
    }


def _mask_fits(e: Episode, written: int) -> bool:
    mask = e.loss_mask_T
    if mask.count(0) + mask.count(1) != len(mask) or any(mask[: e.prompt_length]):
        return False
    if mask and not 1 <= e.prompt_length <= len(mask):
        return False
    inside = sum(sum(mask[t.token_start : t.token_stop]) for t in e.turns)
    claimed = sum(t.token_stop - t.token_start for t in e.turns)
    return inside == claimed and (inside == written or (e.outcome == "policy_failure" and inside < written))


def _spans_fit(e: Episode, written: int) -> bool:
    stop, version, covered = 0, 0, 0
    for span in e.spans:
        if span.start < stop or span.stop <= span.start or span.version < version:
            return False
        stop, version = span.stop, span.version
        covered += sum(e.loss_mask_T[span.start : span.stop])
    return stop <= len(e.token_ids_T) and covered == written


def _turns_ordered(e: Episode) -> bool:
    stop = 0
    for index, turn in enumerate(e.turns):
        if turn.index != index or turn.token_start < stop or turn.token_stop < turn.token_start:
            return False
        stop = turn.token_stop
    return stop <= len(e.token_ids_T)


def _verdict(e: Episode) -> dict[str, Any]:
    v = e.verdict
    if v is None:
        return {"verdict_score": None, "verdict_fits": None}
    finite = math.isfinite(v.score) and all(map(math.isfinite, v.components.values()))
    distinct = len({check.id for check in v.checks}) == len(v.checks)
    return {
        "verdict_score": v.score if math.isfinite(v.score) else None,
        "verdict_fits": finite and distinct and (v.tampering is None or v.score == 0),
    }
