"""The batch plan: which groups run, when a batch seals, and that sealing does not depend on who finished first."""

from hypothesis import given
from hypothesis import strategies as st

from data_contracts.records import Disposition, GroupShard
from tasks.batch_plan import BatchPlan


def shard(order: int, disposition: Disposition = "kept") -> GroupShard:
    return GroupShard(
        group_id=f"c/{order}",
        problem_id=f"p/{order}",
        domain="d",
        order=order,
        uri=f"g/{order}",
        sha256="0" * 64,
        rows=2,
        telemetry_uri="",
        disposition=disposition,
        rewards_G=(0.0, 1.0),
        outcomes_G=("scored", "scored"),
        sampled_tokens=3,
    )


def run(plan: BatchPlan, outcomes: list[Disposition], pick) -> BatchPlan:
    while not plan.sealable():
        for order in plan.next_orders():
            plan.submitted(order)
        plan.record(shard(order := pick(sorted(plan.in_flight)), outcomes[order]))
    return plan


def orders(plan: BatchPlan) -> list[int]:
    return [one.order for one in plan.batch()]


def test_a_batch_without_losses_is_the_first_groups():
    plan = run(BatchPlan(groups=3, problems=6, refill_budget=3), ["kept"] * 6, min)
    assert orders(plan) == [0, 1, 2]
    assert plan.unused() == [3, 4, 5]
    assert plan.discarded() == ()


def test_discarded_groups_are_refilled_within_the_budget():
    outcomes: list[Disposition] = ["kept", "zero_variance", "infra_failure", "kept", "kept", "kept"]
    plan = run(BatchPlan(groups=3, problems=6, refill_budget=2), outcomes, max)
    assert orders(plan) == [0, 3, 4]
    assert [one.order for one in plan.discarded()] == [1, 2]


def test_equal_groups_fill_up_when_the_refills_are_spent():
    outcomes: list[Disposition] = ["zero_variance", "kept", "zero_variance", "zero_variance"]
    plan = run(BatchPlan(groups=3, problems=4, refill_budget=1), outcomes, min)
    assert orders(plan) == [0, 1, 2]


def test_lost_and_quarantined_groups_never_fill_up():
    outcomes: list[Disposition] = ["quarantined", "infra_failure", "kept"]
    plan = run(BatchPlan(groups=3, problems=3, refill_budget=0), outcomes, min)
    assert orders(plan) == [2]


def test_the_window_bounds_groups_in_flight():
    plan = BatchPlan(groups=5, problems=9, refill_budget=0, window=2)
    assert plan.next_orders() == [0, 1]
    plan.submitted(0)
    plan.submitted(1)
    assert plan.next_orders() == []
    plan.record(shard(1))
    assert plan.next_orders() == [2]


def test_oversubscription_seals_by_completion():
    plan = BatchPlan(groups=2, problems=4, refill_budget=0, oversubscribe=2)
    assert plan.next_orders() == [0, 1, 2, 3]
    for order in range(4):
        plan.submitted(order)
    plan.record(shard(3))
    plan.record(shard(1))
    assert plan.sealable()
    assert orders(plan) == [1, 3]


@given(
    st.lists(st.sampled_from(["kept", "zero_variance", "infra_failure", "quarantined"]), min_size=1, max_size=12),
    st.integers(1, 8),
    st.integers(0, 8),
    st.integers(0, 3),
    st.randoms(use_true_random=False),
)
def test_sealing_depends_on_outcomes_not_on_the_order_of_completion(outcomes, groups, budget, window, random):
    def fresh() -> BatchPlan:
        return BatchPlan(groups=groups, problems=len(outcomes), refill_budget=budget, window=window)

    one, two = run(fresh(), outcomes, min), run(fresh(), outcomes, random.choice)
    assert orders(one) == orders(two)
    assert len(orders(one)) <= groups
    assert len(one.finished) <= groups + budget
    assert set(orders(one)).isdisjoint({i for i, o in enumerate(outcomes) if o in ("infra_failure", "quarantined")})
