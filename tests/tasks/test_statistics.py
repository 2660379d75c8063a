"""Bootstrap intervals: reproducible, centred, and paired by problem."""

import pytest

from data_contracts.errors import ContractError
from data_contracts.records import DomainEval, EpisodesRef, EvalReport
from tasks.statistics import bootstrap_mean, paired


def report(version: int, rewards: dict[str, float]) -> EvalReport:
    mean = sum(rewards.values()) / len(rewards)
    domain = DomainEval(domain="d", episodes=len(rewards), mean_reward=mean, low=0, high=1, pass_rate=0, rewards=rewards)
    return EvalReport(campaign="c", version=version, domains=(domain,), episodes=EpisodesRef(uri="e", sha256="0", rows=1))


def test_interval_holds_the_mean_and_is_reproducible():
    values = [0.0, 1.0] * 32
    first, second = bootstrap_mean(values, resamples=2000), bootstrap_mean(values, resamples=2000)
    assert first == second
    assert first.mean == 0.5
    # the standard error of 64 Bernoulli(0.5) draws is 0.0625: the interval is about +-1.96 of it
    assert first.low == pytest.approx(0.5 - 0.1225, abs=0.02)
    assert first.high == pytest.approx(0.5 + 0.1225, abs=0.02)


def test_pairing_removes_the_spread_between_problems():
    before = report(0, {f"p{i}": i / 64 for i in range(64)})
    after = report(6, {f"p{i}": i / 64 + 0.1 for i in range(64)} | {"new": 1.0})
    (gain,) = paired(before, after, resamples=500)
    assert gain.problems == 64
    assert gain.low == pytest.approx(0.1)
    assert gain.high == pytest.approx(0.1)


def test_no_scored_problem_is_an_error():
    with pytest.raises(ContractError, match="no held-out problem"):
        bootstrap_mean([], resamples=100)
