"""The wait for a backend that is away: back-off, budget, and what people read."""

from __future__ import annotations

from tasks.outage import FIRST_SECONDS, LONGEST_SECONDS, Outage


def met(budget: float = 100.0) -> Outage:
    outage = Outage(budget=budget)
    outage.meet(3, "sandbox_unreachable: no engine answers", now=10.0)
    outage.meet(1, "sandbox_unreachable: no engine answers", now=10.0)
    return outage


def test_groups_are_sent_again_later_and_later():
    outage, now, pauses = met(), 10.0, []
    assert outage.release(now=now) == []
    for _ in range(8):
        pauses.append(outage.pause(now=now))
        now += pauses[-1]
        assert outage.release(now=now) == [1, 3]
        assert outage.pause(now=now) == float("inf"), "nothing is held while they are on their way"
        outage.meet(3, "sandbox_unreachable: x", now=now)
        outage.meet(1, "sandbox_unreachable: x", now=now)
    assert pauses[:3] == [FIRST_SECONDS, 2 * FIRST_SECONDS, 4 * FIRST_SECONDS]
    assert pauses[-1] == LONGEST_SECONDS


def test_another_end_of_a_group_ends_the_outage_and_releases_the_rest():
    outage = met()
    assert outage.end(now=40.0) == 30.0
    assert outage.release(now=40.0) == [1, 3]
    assert outage.end(now=41.0) == 0.0
    assert not outage.given_up(now=1000.0)


def test_the_budget_is_of_one_stretch_and_moves_the_stages_deadline_once():
    outage = met(budget=20.0)
    assert not outage.given_up(now=30.0)
    assert outage.given_up(now=30.1)
    outage.end(now=25.0)
    assert outage.extension(now=60.0) == 15.0
    outage.meet(3, "sandbox_unreachable: x", now=100.0)
    assert not outage.given_up(now=119.0)
    assert outage.extension(now=119.0) == 20.0, "a backend that comes and goes cannot keep a stage for ever"


def test_the_message_says_what_waits_for_how_long_and_is_not_repeated_at_once():
    outage = met()
    said = outage.message(campaign="c", groups=8, now=10.0)
    assert said is not None
    for part in (
        "'c'",
        "no engine answers",
        "2 of 8 groups",
        "nothing was scored",
        "100 s",
        "stack.sandbox.outage_wait_seconds",
    ):
        assert part in said
    assert outage.message(campaign="c", groups=8, now=11.0) is None
    assert "Waited 30 s" in (outage.message(campaign="c", groups=8, now=40.0) or "")
