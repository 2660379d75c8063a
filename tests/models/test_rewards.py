"""Scores: components, clipping, the three outcomes, and the errors that name where a bad number is."""

from __future__ import annotations

import math
from typing import Any

import pytest

from data_contracts.config import RewardConfig
from data_contracts.errors import ConfigError, ContractError
from data_contracts.records import Budgets, Episode, Failure, Message, Turn, Verdict
from models.rewards import check_weights, score_group
from models.rewards.overlong import overlong_penalty


def verdict(score: float, **components: float) -> Verdict:
    return Verdict(verifier="v", trust="cases", score=score, passed=score == 1, checks=(), components=components)


def turn(index: int, error: str | None = None) -> Turn:
    message = Message(role="assistant", content="x")
    return Turn(index=index, message=message, token_start=2, token_stop=4, finish_reason="stop", parse_error=error)


def episode(member: int = 0, *, written: int = 2, **changes: Any) -> Episode:
    fields: dict[str, Any] = {
        "id": f"g/{member}",
        "group_id": "g",
        "problem_id": "echo/train/1",
        "domain": "echo",
        "split": "train",
        "campaign": "c",
        "iteration": 0,
        "member": member,
        "prompt": (),
        "tools": (),
        "token_ids_T": tuple(range(2 + written)),
        "loss_mask_T": (0, 0) + (1,) * written,
        "logprobs_T": (0.0, 0.0) + (-1.0,) * written,
        "prompt_length": 2,
        "spans": (),
        "turns": (turn(0),),
        "stop_reason": "answered",
        "outcome": "scored",
        "verdict": verdict(1.0),
    }
    return Episode(**(fields | changes))


def test_default_reward_is_the_verdict() -> None:
    scores = score_group(RewardConfig(), [episode(0), episode(1, verdict=verdict(0.25))])
    assert [score.reward for score in scores] == [1.0, 0.25]
    assert scores[1].components == {"verdict": 0.25}
    assert scores == score_group(RewardConfig(), [episode(0), episode(1, verdict=verdict(0.25))])


def test_weights_reach_the_parts_of_a_verdict() -> None:
    config = RewardConfig(weights={"verdict": 0.5, "verdict.format": 0.25, "parse_ok": 0.25})
    one = episode(verdict=verdict(1.0, format=0.5, other=1.0), turns=(turn(0), turn(1, "no closing tag")))
    (score,) = score_group(config, [one])
    assert score.reward == pytest.approx(0.5 + 0.125 + 0.125)
    assert score.components == {"verdict": 1.0, "verdict.format": 0.5, "verdict.other": 1.0, "parse_ok": 0.5}


def test_reward_is_clipped_to_the_range() -> None:
    config = RewardConfig(weights={"verdict": 3.0}, low=0.5, high=2.0)
    scores = score_group(config, [episode(0), episode(1, verdict=verdict(0.0))])
    assert [score.reward for score in scores] == [2.0, 0.5]


def test_policy_failure_earns_no_verdict_but_keeps_its_shaping() -> None:
    config = RewardConfig(weights={"verdict": 1.0, "verdict.format": 1.0, "overlong": 0.5}, low=-1.0, overlong_buffer=4)
    failed = episode(
        written=8,
        outcome="policy_failure",
        stop_reason="token_budget",
        verdict=verdict(1.0, format=1.0),
        budgets=Budgets(max_tokens_per_turn=8),
    )
    (score,) = score_group(config, [failed])
    assert score.reward == -0.5
    assert score.components == {"verdict": 0.0, "verdict.format": 0.0, "overlong": -1.0}


def test_infra_failure_has_no_score() -> None:
    lost = episode(
        1, outcome="infra_failure", stop_reason="infra", verdict=None, failure=Failure(cause="node_lost", detail="x")
    )
    assert [score.episode_id for score in score_group(RewardConfig(), [episode(0), lost])] == ["g/0"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_component_names_episode_and_component(bad: float) -> None:
    with pytest.raises(ContractError, match=r"'verdict\.speed' of episode 'g/3'"):
        score_group(RewardConfig(), [episode(3, verdict=verdict(1.0, speed=bad))])


def test_a_scored_episode_without_verdict_is_refused() -> None:
    with pytest.raises(ContractError, match="g/0"):
        score_group(RewardConfig(), [episode(verdict=None)])


def test_groups_are_not_mixed() -> None:
    with pytest.raises(ContractError, match="one group expected"):
        score_group(RewardConfig(), [episode(0), episode(1, group_id="h")])


@pytest.mark.parametrize(
    "config",
    [
        RewardConfig(weights={"verdct": 1.0}),
        RewardConfig(weights={"verdict.": 1.0}),
        RewardConfig.model_construct(weights={"verdict": math.nan}),
        RewardConfig(low=1.0, high=0.0),
    ],
)
def test_bad_configuration_is_refused_before_a_run(config: RewardConfig) -> None:
    with pytest.raises(ConfigError):
        check_weights(config)


@pytest.mark.parametrize(("length", "expected"), [(0, 0.0), (12, 0.0), (13, -0.25), (14, -0.5), (16, -1.0), (99, -1.0)])
def test_overlong_penalty_follows_dapo(length: int, expected: float) -> None:
    assert overlong_penalty(length, limit=16, buffer=4) == expected
    assert overlong_penalty(length, limit=16, buffer=0) == 0.0
