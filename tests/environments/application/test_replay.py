"""What the log says is what happened: any episode, replayed from its stored log, gives its state; an altered log is noticed."""

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_contracts.errors import InputError
from data_contracts.records import Message, ToolCall
from environments.application.database import seal
from environments.application.replay import Disagreement, logged, replay
from environments.scripted import calls
from tests.environments.application.jars import BANK, LOOK, PUT, played, problem

POSED = problem(parts=[{"id": "rules", "kind": "business_rules", "settings": {"rules": ["no_debt"]}}])
JARS = st.sampled_from(["red", "blue", "green", "x" * 50])
CALLS = st.one_of(
    st.tuples(st.just("put"), st.fixed_dictionaries({"jar": JARS, "coins": st.integers(-9, 9) | st.just(2**70)})),
    st.tuples(st.sampled_from(["look", "add", "put_then_refuse", "nothing"]), st.fixed_dictionaries({"jar": JARS})),
    st.tuples(st.just("weigh"), st.fixed_dictionaries({"jar": JARS, "weight": st.floats(-1e9, 1e9) | st.integers(-9, 9)})),
    st.tuples(st.just("put"), st.sampled_from(["{", '{"jar": "red"}', '{"jar": "red", "coins": 2.0}', " " * 2_500, ""])),
)


async def state_after(*made: tuple[str, Any]) -> dict[str, Any]:
    """What an episode of these calls stores, through JSON as the store has it."""
    texts = [(name, given if isinstance(given, str) else msgspec.json.encode(given).decode()) for name, given in made]
    told = tuple(ToolCall(call_id=f"c{n}", name=name, arguments=text) for n, (name, text) in enumerate(texts))
    episode = await played(POSED, *((Message(role="assistant", content="", tool_calls=told),) if told else ()))
    assert episode.collected is not None
    state: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(episode.collected.state))
    return state


@settings(deadline=None)
@given(st.lists(CALLS, max_size=12))
def test_the_replayed_log_is_the_state(made: list[tuple[str, Any]]) -> None:
    state = asyncio.run(state_after(*made))
    history = logged(BANK, POSED, state)
    assert seal(history.end, state["calls"]) == state["seal"]
    assert [moment.ok for moment in history.moments] == [call["status"] == "ok" for call in state["calls"]]
    for before, after in zip(history.moments, history.moments[1:], strict=False):
        assert before.after == after.before
    for moment in history.moments:
        assert moment.ok or moment.after == moment.before


@settings(deadline=None)
@given(st.lists(CALLS, max_size=8), st.data())
def test_a_refused_call_can_be_left_out(made: list[tuple[str, Any]], data: st.DataObject) -> None:
    """Only calls that succeeded count for the state, whatever the clock says."""
    every = [{"name": name, "arguments": given} for name, given in made]
    whole = replay(BANK, BANK.populate(7), BANK.offered(POSED), every)
    kept = [call for call, moment in zip(every, whole.moments, strict=True) if moment.ok]
    short = replay(BANK, BANK.populate(7), BANK.offered(POSED), kept)

    def counted(state: Any) -> Any:
        return sorted(map(repr, state["jars"])), sorted(row["id"] for row in state["moves"])

    assert counted(whole.end) == counted(short.end)


async def test_the_log_of_an_altered_or_forged_episode_is_noticed() -> None:
    state = await state_after(("look", LOOK["arguments"]), ("put", PUT["arguments"]), ("look", {"jar": "none"}))
    calls = state["calls"]
    assert logged(BANK, POSED, state).end["jars"]
    altered = [
        {**state, "calls": calls[:1] + calls[2:]},  # a write that is left out
        {**state, "calls": calls[1:]},  # a look, which rules may ask for
        {**state, "calls": [*calls, calls[1]]},  # one that was not made
        {**state, "calls": [{**calls[0], "result": {"coins": 1_000_000}}, *calls[1:]]},
        {**state, "calls": [*calls[:2], {**calls[2], "status": "ok", "result": None}]},
        {**state, "calls": [calls[0], {**calls[1], "status": "error"}, calls[2]]},
        {**state, "seal": "0" * 64},
    ]
    for changed in altered:
        with pytest.raises(Disagreement, match="verifier_error"):
            logged(BANK, POSED, changed)
    for short in ({}, {"calls": calls}, {"seal": "x"}):
        with pytest.raises(InputError, match="audit log"):
            logged(BANK, POSED, short)


async def test_a_log_stays_replayable_when_arguments_are_longer_than_it_keeps() -> None:
    padded = '{"jar": "red", "coins": 1' + " " * 5_000 + "}"
    state = await state_after(("put", padded), ("put", PUT["arguments"]))
    assert [call["status"] for call in state["calls"]] == ["error", "ok"]
    assert len(state["calls"][0]["arguments"]) < len(padded)
    assert [moment.ok for moment in logged(BANK, POSED, state).moments] == [False, True]


async def test_people_can_read_a_call() -> None:
    episode = await played(POSED, calls("put", {"jar": "red", "coins": -3}), calls("look", "{"))
    first, second = logged(BANK, POSED, episode.collected.state).moments
    assert first.shown() == "call 1, put(jar='red', coins=-3)"
    assert second.shown() == "call 2, look() (refused)"
