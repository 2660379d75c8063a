"""Deciding whether a replica really serves the new weights. Pure.

A weight update can fail silently (a packed output head that keeps the old values answers 200), so it is proven: the replica
samples tokens, and its log-probabilities must lie within tolerance of the trainer's new weights *and* closer to them than to
the old ones; a small step within tolerance would otherwise hide a stale engine. When the step itself is below tolerance the
tokens cannot tell; then the proof says that only checksums were compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from data_contracts.records import ReplicaProof

MEAN_TOLERANCE = 0.02
"""Mean distance that 16-bit formats may show."""
_FAR = 1e9


def judge(
    engine_T: Sequence[float],
    new_T: Sequence[float],
    old_T: Sequence[float] | None,
    *,
    tolerance: float,
    dtype: str,
    replica: str,
    version: int,
) -> ReplicaProof:
    """The verdict over T decoded tokens: the engine's log-probabilities, the trainer's under new and under old weights.

    float32 compares the largest distance with `tolerance`; other formats compare the mean with MEAN_TOLERANCE. `old_T` is None
    for version 0, which has no old weights: `distance_old` and `step_distance` are then 0. What is not finite counts as far.
    """
    exact = dtype == "float32"
    limit = tolerance if exact else MEAN_TOLERANCE
    new = _distance(engine_T, new_T, largest=exact)
    old = _distance(engine_T, old_T, largest=exact) if old_T is not None else 0.0
    step = _distance(new_T, old_T, largest=exact) if old_T is not None else 0.0
    small = old_T is not None and step <= limit
    if not engine_T:
        accepted, reason = False, "the replica returned no tokens to compare"
    elif new > limit:
        accepted, reason = False, _far_reason(new, old, limit, known=old_T is not None)
    elif old_T is None:
        accepted, reason = True, "version 0 has no old weights to compare with"
    elif small:
        accepted, reason = True, f"the step itself ({step:.2e}) is below {limit:g}: only checksums were compared"
    elif new >= old:
        accepted, reason = False, f"as close to the old weights ({old:.2e}) as to the new ones ({new:.2e})"
    else:
        accepted, reason = True, ""
    return ReplicaProof(
        replica=replica,
        version=version,
        tokens=len(engine_T),
        distance_new=new,
        distance_old=old,
        step_distance=step,
        accepted=accepted,
        checksum_only=accepted and small,
        reason=reason,
    )


def refused(replica: str, version: int, reason: str) -> ReplicaProof:
    """A replica that could not even be asked."""
    return ReplicaProof(
        replica=replica,
        version=version,
        tokens=0,
        distance_new=0.0,
        distance_old=0.0,
        step_distance=0.0,
        accepted=False,
        checksum_only=False,
        reason=reason,
    )


def _distance(left_T: Sequence[float], right_T: Sequence[float], *, largest: bool) -> float:
    if len(left_T) != len(right_T):
        return _FAR
    gaps = [abs(left - right) for left, right in zip(left_T, right_T, strict=True)]
    if any(not math.isfinite(gap) for gap in gaps):
        return _FAR
    if not gaps:
        return 0.0
    return min(_FAR, max(gaps) if largest else sum(gaps) / len(gaps))


def _far_reason(new: float, old: float, limit: float, *, known: bool) -> str:
    if known and old < new:
        return f"it still serves old weights: {old:.2e} from the old, {new:.2e} from the new ones (tolerance {limit:g})"
    return f"it is {new:.2e} away from the trainer's new weights (tolerance {limit:g})"
