"""The ledger as a state machine: any interleaving of ready steps ends, nothing runs twice or before its inputs."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_contracts.errors import LedgerError
from data_contracts.ledger import CampaignState, Step, curation_view, finished, fold, iteration_finished, ready
from data_contracts.ledger_events import (
    AnyEvent,
    Created,
    Curated,
    Entry,
    Evaluated,
    Extended,
    Holder,
    LeaseReleased,
    LeaseTaken,
    Paused,
    Published,
    Registered,
    Resumed,
    Scored,
    Sealed,
    Trained,
    decode,
    encode,
)
from data_contracts.records import CheckpointRef, EpisodesRef, EvalRef, ProblemsRef, PublishResult, ScoresRef, TrainResult

HOLDER = Holder(run="r1", host="h", machine="m", pid=1, pid_started=0.0)


def checkpoint(version: int) -> CheckpointRef:
    return CheckpointRef(uri=f"campaigns/c/checkpoints/v{version:06d}", sha256="0", version=version, size=1)


def event_of(step: Step) -> AnyEvent:
    n = step.number
    ref = {"uri": str(step), "sha256": "0", "rows": 1}
    match step.kind:
        case "curate":
            return Curated(iteration=n, problems=ProblemsRef(**ref), sampler_state={"drawn": n})
        case "rollout":
            return Sealed(iteration=n, episodes=EpisodesRef(**ref), counts={"kept": 1})
        case "score":
            return Scored(iteration=n, scores=ScoresRef(**ref))
        case "train":
            result = TrainResult(key=str(n), checkpoint=checkpoint(n + 1), outcome="trained", metrics={"loss": 0.5})
            return Trained(iteration=n, result=result)
        case "publish":
            return Published(version=n, result=PublishResult(version=n, proofs=()))
        case "evaluate":
            return Evaluated(version=n, report=EvalRef(**ref), means={"arithmetic": n / 10})


def start(*, d: int = 0, every: int = 3, iterations: int = 4) -> CampaignState:
    config = {"iterations": iterations, "max_staleness": d, "evaluate": {"every": every}}
    created = Created(campaign="c", config=config, base=checkpoint(0))
    return fold(
        [
            Entry(seq=0, epoch=0, writer="w", event=created),
            Entry(seq=1, epoch=1, writer="w", event=LeaseTaken(holder=HOLDER, since=0.0)),
        ]
    )


def after(state: CampaignState, *events: AnyEvent) -> CampaignState:
    return fold(
        [Entry(seq=state.next_seq + k, epoch=state.epoch, writer="w", event=event) for k, event in enumerate(events)], state
    )


def through(state: CampaignState, *steps: str) -> CampaignState:
    for text in steps:
        kind, number = text.split()
        state = after(state, event_of(Step(kind=kind, number=int(number))))  # type: ignore[arg-type]
    return state


def names(state: CampaignState, until: int = 4) -> set[str]:
    return {str(step) for step in ready(state, until=until)}


# ----------------------------------------------------------------------------------------------------------------- in order


def test_strictly_on_policy_walk_in_full() -> None:
    state = start(every=2, iterations=2)
    walk = []
    while steps := sorted(ready(state, until=2), key=str):
        walk.append([str(step) for step in steps])
        state = after(state, *map(event_of, steps))
    assert walk == [
        ["curate 0", "publish 0"],
        ["evaluate 0"],
        ["rollout 0"],
        ["score 0"],
        ["curate 1", "train 0"],
        ["publish 1"],
        ["rollout 1"],
        ["score 1"],
        ["train 1"],
        ["publish 2"],
        ["evaluate 2"],
    ]
    assert finished(state, until=2)


def test_with_staleness_the_next_rollout_overlaps_training() -> None:
    state = through(start(d=1), "publish 0", "curate 0", "rollout 0", "score 0", "curate 1")
    assert names(state) == {"rollout 1", "evaluate 0", "curate 2"}
    state = through(state, "evaluate 0")
    assert names(state) == {"rollout 1", "train 0", "curate 2"}
    trained = through(state, "train 0")
    assert "publish 1" not in names(trained), "rollout 1 still needs version 0"
    assert "publish 1" in names(through(trained, "rollout 1"))


def test_an_owed_evaluation_holds_back_the_next_version_and_on_policy_rollouts() -> None:
    state = through(start(every=1), "publish 0")
    assert "rollout 0" not in names(through(state, "curate 0"))
    done = through(state, "curate 0", "evaluate 0", "rollout 0", "score 0", "train 0", "publish 1", "curate 1")
    assert names(done) == {"evaluate 1"}


def test_finished_campaign_extends() -> None:
    state = start(iterations=1)
    state = through(state, "publish 0", "curate 0", "evaluate 0", "rollout 0", "score 0", "train 0", "publish 1", "evaluate 1")
    assert ready(state, until=1) == frozenset()
    assert finished(state, until=1)
    state = after(state, Extended(iterations=3))
    assert state.iterations == 3
    assert names(state, until=3) == {"curate 1"}
    with pytest.raises(LedgerError, match="may only grow"):
        after(state, Extended(iterations=2))


def test_pause_stops_everything_until_resumed() -> None:
    state = after(start(), Paused(iteration=0, reason="too many lost groups"))
    assert ready(state, until=4) == frozenset()
    assert state.paused is not None
    assert state.paused.reason == "too many lost groups"
    assert names(after(state, Resumed())) == {"curate 0", "publish 0"}


def test_curation_sees_no_scores_that_may_or_may_not_be_there() -> None:
    early = through(start(d=1), "publish 0", "curate 0", "rollout 0", "score 0", "evaluate 0")
    late = through(early, "train 0")
    for state in (early, late):
        view = curation_view(state, 1)
        assert (set(view.curated), set(view.scored), set(view.sealed)) == ({0}, set(), set())
        assert set(curation_view(state, 2).scored) == {0}


# ------------------------------------------------------------------------------------------------------------ contradictions


@pytest.mark.parametrize(
    ("steps", "bad", "why"),
    [
        ((), "rollout 0", "nothing was curated"),
        (("curate 0",), "rollout 0", "version None serves"),
        (("curate 0",), "curate 0", "done already"),
        (("curate 0",), "curate 1", "scores are missing"),
        ((), "curate 1", "the one before is not curated"),
        (("publish 0",), "publish 1", "not trained"),
        ((), "evaluate 0", "version None serves"),
        (("publish 0",), "evaluate 1", "version 0 serves"),
        (("publish 0", "curate 0", "rollout 0", "score 0"), "train 0", "version 0 is not evaluated"),
        (("publish 0", "curate 0", "evaluate 0", "rollout 0"), "train 0", "not scored"),
        (
            ("publish 0", "curate 0", "evaluate 0", "rollout 0", "score 0", "train 0", "curate 1"),
            "rollout 1",
            "older than 1 - 0",
        ),
    ],
)
def test_a_contradicting_event_is_refused(steps: tuple[str, ...], bad: str, why: str) -> None:
    with pytest.raises(LedgerError, match=why):
        through(start(), *steps, bad)


def test_a_checkpoint_of_another_version_is_refused() -> None:
    state = through(start(), "publish 0", "curate 0", "evaluate 0", "rollout 0", "score 0")
    result = TrainResult(key="k", checkpoint=checkpoint(7), outcome="trained", metrics={})
    with pytest.raises(LedgerError, match="its checkpoint is version 7"):
        after(state, Trained(iteration=0, result=result))


def test_gaps_epochs_and_leases_are_checked() -> None:
    state = start()
    event = event_of(Step(kind="curate", number=0))
    with pytest.raises(LedgerError, match="sequence number 3 where 2"):
        fold([Entry(seq=3, epoch=1, writer="w", event=event)], state)
    with pytest.raises(LedgerError, match="written under epoch 0"):
        fold([Entry(seq=2, epoch=0, writer="w", event=event)], state)
    with pytest.raises(LedgerError, match="epoch 5 where 2"):
        fold([Entry(seq=2, epoch=5, writer="w", event=LeaseTaken(holder=HOLDER, since=0.0))], state)
    with pytest.raises(LedgerError, match="lease is free"):
        after(state, LeaseReleased(), event)
    with pytest.raises(LedgerError, match="has to be Created"):
        fold([Entry(seq=0, epoch=1, writer="w", event=LeaseTaken(holder=HOLDER, since=0.0))])
    with pytest.raises(LedgerError, match="does not exist yet"):
        after(state, Registered(version=1, name="champion"))


def test_folding_changes_no_state_that_it_was_given() -> None:
    state = start()
    before = state.copy()
    through(state, "publish 0", "curate 0")
    assert state == before


def test_entries_round_trip_and_damage_is_named() -> None:
    for step in ("curate 0", "rollout 0", "score 0", "train 0", "publish 0", "evaluate 0"):
        kind, number = step.split()
        event = event_of(Step(kind=kind, number=int(number)))  # type: ignore[arg-type]
        entry = Entry(seq=3, epoch=1, writer="w", event=event)
        assert decode(encode(entry), key="k") == entry
        assert encode(decode(encode(entry), key="k")) == encode(entry)
    with pytest.raises(LedgerError, match=r"ledger/00000003\.json is not a ledger entry.*seq"):
        decode(b'{"seq": "x"}', key="ledger/00000003.json")


# --------------------------------------------------------------------------------------------------------------- properties

NEEDS = {
    "curate": lambda s, n, d: (n == 0 or n - 1 in s.curated) and (n - 1 - d < 0 or n - 1 - d in s.scored),
    "rollout": lambda s, n, d: (
        n in s.curated and (n == 0 or n - 1 in s.sealed) and s.serving is not None and s.serving >= n - d
    ),
    "score": lambda s, n, d: n in s.sealed,
    "train": lambda s, n, d: n in s.scored and 0 in s.evaluated and (n == 0 or n - 1 in s.trained),
    "publish": lambda s, n, d: n == 0 or n - 1 in s.trained,
    "evaluate": lambda s, n, d: s.serving == n,
}


@settings(max_examples=300, deadline=None)
@given(
    d=st.integers(0, 3),
    every=st.integers(1, 4),
    untils=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_interleaving_reaches_the_end(d: int, every: int, untils: list[int], seed: int) -> None:
    """Steps start when ready, run side by side, and end in any order; several advances follow each other."""
    chance = random.Random(seed)
    state = start(d=d, every=every, iterations=max(untils))
    done: list[Step] = []
    for until in untils:
        running: set[Step] = set()
        while running or not finished(state, until=until):
            startable = ready(state, until=until) - running
            if startable and (not running or chance.random() < 0.6):
                step = chance.choice(sorted(startable, key=str))
                assert NEEDS[step.kind](state, step.number, d), f"{step} was ready before its inputs"
                if step.kind == "publish" and step.number > 0:
                    assert not {s.kind for s in running} & {"rollout", "evaluate"}, "the served version changed under a sampler"
                if step.kind in ("rollout", "evaluate"):
                    assert "publish" not in {s.kind for s in running}
                running.add(step)
                continue
            assert running, f"nothing runs, nothing is ready and the campaign is not finished: {done}"
            step = chance.choice(sorted(running, key=str))
            running.remove(step)
            before = ready(state, until=until)
            state = after(state, event_of(step))
            assert before - {step} <= ready(state, until=until), "a ready step was taken back"
            done.append(step)
        assert ready(state, until=until) == frozenset()
    assert len(done) == len(set(done)), "a step ran twice"
    last = max(untils)
    assert {s.number for s in done if s.kind == "train"} == set(range(last))
    evaluated = {s.number for s in done if s.kind == "evaluate"}
    assert evaluated >= {0, last} | set(range(0, last + 1, every))
    assert all(iteration_finished(state, i, until=last) for i in range(last))


@settings(max_examples=100, deadline=None)
@given(d=st.integers(0, 2), every=st.integers(1, 3), seed=st.integers(0, 2**32 - 1))
def test_the_version_of_every_batch_is_a_function_of_the_ledger(d: int, every: int, seed: int) -> None:
    chance = random.Random(seed)
    state, versions, until = start(d=d, every=every, iterations=6), {}, 6
    while steps := ready(state, until=until):
        step = chance.choice(sorted(steps, key=str))
        if step.kind == "rollout":
            versions[step.number] = state.serving
        state = after(state, event_of(step))
    assert versions == {i: max(0, i - d) for i in range(until)}


@settings(max_examples=50, deadline=None)
@given(d=st.integers(0, 2), seed=st.integers(0, 2**32 - 1))
def test_folding_piecewise_is_folding_at_once(d: int, seed: int) -> None:
    chance = random.Random(seed)
    state = start(d=d)
    entries: list[Entry] = []
    while steps := ready(state, until=4):
        event = event_of(chance.choice(sorted(steps, key=str)))
        entries.append(Entry(seq=state.next_seq, epoch=1, writer="w", event=event))
        state = fold(entries[-1:], state)
    assert fold(entries, start(d=d)) == state
