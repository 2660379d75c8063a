"""What is kept: rule by rule, and never less as the campaign goes on."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from data_contracts.config import RetentionConfig
from data_contracts.ledger import CampaignState, Step
from data_contracts.ledger_events import Evaluated, Registered, Trained
from data_contracts.retention import best_version, reasons_to_keep
from tests.data_contracts.test_ledger import after, event_of, start, through


def trained(versions: int, *, every: int = 1, rewards: dict[int, float] | None = None) -> CampaignState:
    """A campaign with `versions` trained, published and (when due) evaluated versions."""
    state = start(every=every, iterations=versions)
    for step in _walk(versions, every):
        event = event_of(step)
        if isinstance(event, Evaluated) and rewards is not None:
            event = msgspec.structs.replace(event, means={"a": rewards.get(event.version, 0.0)})
        state = after(state, event)
    return state


def _walk(versions: int, every: int) -> list[Step]:
    steps = [Step(kind="publish", number=0), Step(kind="evaluate", number=0)]
    for i in range(versions):
        steps += [Step(kind=kind, number=i) for kind in ("curate", "rollout", "score", "train")]
        steps.append(Step(kind="publish", number=i + 1))
        if (i + 1) % every == 0:
            steps.append(Step(kind="evaluate", number=i + 1))
    return steps


def kept(state: CampaignState, config: RetentionConfig | None = None, **more: set) -> dict[int, str]:
    arguments = {"full_states": set(), "named": set()} | more
    return reasons_to_keep(state, config or RetentionConfig(last=2, every=50), **arguments)


def test_base_last_and_serving() -> None:
    assert kept(trained(6, every=9)) == {
        0: "base, newest full optimizer state, best evaluation, every 50th",
        5: "one of the last 2, serving or in flight",
        6: "one of the last 2, serving or in flight",
    }


def test_the_best_evaluation_stays() -> None:
    state = trained(8, rewards={3: 0.9, 5: 0.9, 8: 0.4})
    assert best_version(state) == 3
    assert kept(state)[3] == "best evaluation"
    assert best_version(start()) is None


def test_every_nth_registered_and_named() -> None:
    state = after(trained(12, every=50), Registered(version=4, name="candidate"))
    uri = state.checkpoint(7).uri
    got = kept(state, RetentionConfig(last=1, every=5), named={f"file:///store/{uri}/", "other"})
    assert got[4] == "registered as candidate"
    assert got[7] == "named by the registry"
    assert got[5] == got[10] == "every 5th"
    assert set(got) == {0, 4, 5, 7, 10, 11, 12}


def test_the_newest_full_state_stays_for_replay() -> None:
    state = trained(9, every=50)
    assert kept(state, full_states={2, 4, 6})[6] == "newest full optimizer state"
    assert not {2, 4} & set(kept(state, full_states={2, 4, 6}))


def test_nothing_newer_than_what_serves_goes_when_publishing_lags() -> None:
    state = through(start(d=3, every=9, iterations=9), "publish 0", "curate 0", "evaluate 0")
    for i in range(3):
        state = through(state, f"rollout {i}", f"score {i}", f"curate {i + 1}", f"train {i}")
    assert set(kept(state, RetentionConfig(last=1, every=50))) == {0, 1, 2, 3}


def test_a_version_in_its_parents_folder_keeps_that_folder() -> None:
    state = through(trained(3, every=50), "curate 3", "rollout 3", "score 3")
    step = event_of(Step(kind="train", number=3))
    assert isinstance(step, Trained)
    same = msgspec.structs.replace(step.result.checkpoint, uri=state.checkpoint(1).uri)
    event = msgspec.structs.replace(step, result=msgspec.structs.replace(step.result, checkpoint=same))
    state = through(after(state, event), "publish 4", "curate 4", "rollout 4", "score 4", "train 4", "publish 5")
    assert kept(state)[1] == "same folder as a kept version"


@settings(max_examples=60, deadline=None)
@given(
    now=st.integers(1, 25),
    later=st.integers(0, 10),
    every=st.integers(1, 6),
    rewards=st.lists(st.floats(0, 1), min_size=36, max_size=36),
    states=st.sets(st.integers(0, 25)),
)
def test_what_may_go_now_is_never_wanted_later(
    now: int, later: int, every: int, rewards: list[float], states: set[int]
) -> None:
    by_version = dict(enumerate(rewards))
    first, second = trained(now, every=every, rewards=by_version), trained(now + later, every=every, rewards=by_version)
    config = RetentionConfig(last=3, every=7)
    may_go = set(range(now + 1)) - set(kept(first, config, full_states={s for s in states if s <= now}))
    assert not may_go & set(kept(second, config, full_states=states))
