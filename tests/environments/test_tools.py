import asyncio
import json
from typing import Any

import msgspec
import pytest

from data_contracts.errors import SandboxLost
from data_contracts.records import Budgets, Message, ToolCall
from environments.base import Action, EnvironmentContext, Step
from environments.domains.calculator import CALCULATOR, CalculatorEnvironment
from environments.registry import domain
from environments.scripted import calls, says
from environments.tools import ToolError, check_arguments

PROBLEM = next(domain("calculator").problems("train", seed=0))


def environment(**budgets: Any) -> CalculatorEnvironment:
    async def acquire(spec: object) -> Any:
        raise AssertionError

    problem = msgspec.structs.replace(PROBLEM, budgets=Budgets(max_turns=9, **budgets))
    return CalculatorEnvironment(problem, EnvironmentContext(episode_id="e", seed=0, acquire=acquire))


async def answer(arguments: str | dict[str, object], name: str = "calculator") -> dict[str, Any]:
    step = await environment().step(Action(message=calls(name, arguments, call_id="c7")))
    (message,) = step.messages
    assert (step.done, message.role, message.tool_call_id, message.name) == (False, "tool", "c7", name)
    return dict(json.loads(message.content))


async def test_a_good_call() -> None:
    assert await answer({"expression": "6 * 7"}) == {"status": "ok", "result": 42}


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ('{"expression": ', "not valid JSON"), ("", "not valid JSON"), ("NaN", "not valid JSON"), ("[" * 100_000, "at most"),
        ("[" * 5_000, "levels deep"),
        ('{"expression": ' + "[" * 972 + "]" * 972 + "}", "levels deep"),
        ('"' + '\\"' * 30_000, "not valid JSON"), ("\ud800", "not valid JSON"),
        ("[]", "not of type 'object'"), ("null", "not of type"),
        ("{}", "'expression' is a required property"), ('{"expression": 5}', "expression: 5 is not of type 'string'"),
        ('{"expression": "1", "x": 2}', "Additional properties"), ('{"expression": "1/0"}', "division by zero"),
        ('{"expression": "os.getpid()"}', "cannot read"),
    ],
)  # fmt: skip
async def test_a_malformed_call_is_an_error_message_to_recover_from(arguments: str, part: str) -> None:
    reply = await answer(arguments)
    assert reply["status"] == "error"
    assert part in reply["message"]


async def test_an_unknown_tool_is_an_error_that_names_the_tools() -> None:
    reply = await answer({}, name="__import__('os').system")
    assert reply["status"] == "error"
    assert "the tools are calculator" in reply["message"]


async def test_a_parse_error_is_an_observation_and_good_calls_beside_it_run() -> None:
    env = environment()
    step = await env.step(Action(message=says("<tool_call>{"), parse_error="no closing tag"))
    assert not step.done
    assert json.loads(step.messages[0].content) == {"status": "error", "message": "tool call not understood: no closing tag"}
    step = await env.step(Action(message=calls("calculator", {"expression": "1+1"}), parse_error="the second call is cut off"))
    assert [json.loads(m.content)["status"] for m in step.messages] == ["ok", "error"]


async def test_a_message_without_a_call_is_the_answer() -> None:
    env = environment()
    await env.step(Action(message=calls("calculator", {"expression": "1+1"})))
    assert await env.step(Action(message=says("2"))) == Step(done=True, stop_reason="answered")
    state = (await env.collect()).state
    assert state["answer"] == "2"
    (log,) = state["calls"]
    assert (log["name"], log["status"], log["result"], log["computed"]) == ("calculator", "ok", 2, True)


async def test_tool_budgets_end_the_episode() -> None:
    call = ToolCall(call_id="c", name="calculator", arguments='{"expression": "1+1"}')
    step = await environment(max_tool_calls=2).step(
        Action(message=Message(role="assistant", content="", tool_calls=(call,) * 3))
    )
    assert (len(step.messages), step.done, step.stop_reason) == (2, True, "tool_budget")
    step = await environment(tool_seconds_total=0.0).step(
        Action(message=Message(role="assistant", content="", tool_calls=(call,)))
    )
    assert (step.done, step.stop_reason) == (True, "time_budget")


async def test_a_lost_box_is_the_policys_doing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def lose(self: object, arguments: object) -> str:
        raise SandboxLost("gone")

    monkeypatch.setattr(CalculatorEnvironment, "_calculate", lose)
    step = await environment().step(Action(message=calls("calculator", {"expression": "1+1"})))
    assert (step.done, step.stop_reason) == (True, "box_killed")


def test_the_tool_is_in_the_openai_function_format() -> None:
    assert PROBLEM.tools == (CALCULATOR,)
    assert CALCULATOR.parameters["type"] == "object"


def test_arguments_of_every_depth_are_answered_on_any_stack() -> None:
    def on_a_deeper_stack(frames: int, text: str) -> None:
        if frames:
            on_a_deeper_stack(frames - 1, text)
            return
        with pytest.raises(ToolError):
            check_arguments(CALCULATOR, text)

    for depth in range(0, 1_000, 9):
        for opening, closing in (("[", "]"), ('{"a":', "1}")):
            on_a_deeper_stack(depth % 100, f'{{"expression": {opening * depth}{closing * depth}, "x": 1}}')


async def test_the_wait_for_the_host_is_not_the_policys_time() -> None:
    class Queueing(CalculatorEnvironment):
        async def _calculate(self, arguments: dict[str, Any]) -> int | str:
            await asyncio.sleep(0.3)
            self.queued(0.3)
            return await super()._calculate(arguments)

    env = Queueing(environment(tool_seconds_total=0.2).problem, environment().context)
    for _ in range(3):
        step = await env.step(Action(message=calls("calculator", {"expression": "6 * 7"})))
        assert not step.done
    assert env.seconds_left() > 0
