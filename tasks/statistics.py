"""Bootstrap intervals over held-out problems. Pure numpy, seeded, so that a report is reproducible.

Method: percentile bootstrap (Efron 1979), resampling problems; paired differences resample the same problems for both sides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from data_contracts.errors import ContractError
from data_contracts.records import EvalReport, Paired


class Interval95(NamedTuple):
    """Mean and the 2.5 % and 97.5 % percentiles of its bootstrap distribution."""

    mean: float
    low: float
    high: float


def bootstrap_mean(values: list[float], *, resamples: int, seed: int = 0) -> Interval95:
    """`values` has one entry a problem; raises ContractError when it is empty."""
    if not values:
        raise ContractError("no held-out problem was scored", remedy="Look at the evaluation's episodes for infra failures")
    values_P = np.asarray(values, dtype=np.float64)
    picks_RP = np.random.default_rng(seed).integers(0, len(values_P), size=(resamples, len(values_P)))
    means_R = values_P[picks_RP].mean(axis=1)
    low, high = np.percentile(means_R, [2.5, 97.5])
    return Interval95(float(values_P.mean()), float(low), float(high))


def paired(before: EvalReport, after: EvalReport, *, resamples: int, seed: int = 0) -> tuple[Paired, ...]:
    """Per domain, the difference after - before over the problems both reports scored."""
    earlier = {domain.domain: domain.rewards for domain in before.domains}
    results = []
    for domain in after.domains:
        base: Mapping[str, float] = earlier.get(domain.domain, {})
        shared = sorted(base.keys() & domain.rewards.keys())
        if not shared:
            continue
        old, new = [base[p] for p in shared], [domain.rewards[p] for p in shared]
        gain = bootstrap_mean([n - o for n, o in zip(new, old, strict=True)], resamples=resamples, seed=seed)
        results.append(
            Paired(
                domain=domain.domain,
                problems=len(shared),
                before=float(np.mean(old)),
                after=float(np.mean(new)),
                difference=gain.mean,
                low=gain.low,
                high=gain.high,
            )
        )
    return tuple(results)
