"""The code that the documentation shows is run as it stands, so that it cannot drift from the classes."""

import inspect
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from data_contracts.config import SandboxConfig
from data_contracts.protocols import SandboxBackend
from data_contracts.records import EnvironmentSpec, Message, Problem, VerifierSpec
from environments.base import Action, Environment, EnvironmentContext
from environments.registry import check_grading
from environments.scripted import calls, says

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), flags=re.DOTALL)


def run(page: str) -> dict[str, Any]:
    scope: dict[str, Any] = {"__name__": "documentation"}
    for block in blocks(page):
        exec(compile(block, page, "exec"), scope)
    return scope


def test_the_page_of_sandboxes_names_settings_and_a_manifest_that_exist() -> None:
    page = (DOCS / "howto/choose-a-sandbox.md").read_text(encoding="utf-8")
    for name, value in re.findall(r"stack\.sandbox\.(\w+)=(\w+)", page):
        assert value in repr(SandboxConfig.model_validate({name: value}))
    (manifest,) = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    pod = yaml.safe_load(manifest)
    assert pod["spec"]["runtimeClassName"] == "kata"
    assert [mount["readOnly"] for mount in pod["spec"]["containers"][0]["volumeMounts"]] == [True]
    (daemon,) = re.findall(r"```json\n(.*?)```", page, flags=re.DOTALL)
    assert set(json.loads(daemon)["runtimes"]) == {"runsc"}


def test_the_howto_ends_with_an_admitted_domain(capsys: pytest.CaptureFixture[str]) -> None:
    scope = run("howto/add-a-domain.md")
    assert scope["report"].ok
    assert "exploit hides_it_in_a_sentence" in capsys.readouterr().out


def test_the_page_of_stateful_services_ends_with_an_admitted_domain(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = types.ModuleType("my_desk")
    monkeypatch.setitem(sys.modules, "my_desk", page)
    for block in blocks("howto/stateful-services.md"):
        exec(compile(block, "stateful-services.md", "exec"), vars(page))
    assert page.report.ok
    assert "exploit right_end_unchecked" in capsys.readouterr().out
    for shown in re.findall(r"\n\n((?:    .*\n)+)", (DOCS / "howto/stateful-services.md").read_text(encoding="utf-8")):
        if shown.startswith('    {"parts"'):
            settings = json.loads(shown)
    problem = next(page.Loans().problems("train", seed=0))
    asked = msgspec.structs.replace(problem, verifier=VerifierSpec(kind="composite", settings=settings))
    check_grading(asked)


def test_the_sketched_worlds_fit_the_protocol() -> None:
    scope = run("concepts/environments.md")
    worlds = [thing for name, thing in scope.items() if name.endswith("World")]
    assert len(worlds) == 5
    for world in worlds:
        assert issubclass(world, Environment)
        assert not inspect.isabstract(world)
        for method in ("reset", "step", "collect", "close", "attachment"):
            assert inspect.iscoroutinefunction(getattr(world, method))


def problem(**settings: Any) -> Problem:
    return Problem(
        id="d/train/1",
        domain="d",
        split="train",
        difficulty=0.5,
        messages=(Message(role="user", content="Begin."),),
        environment=EnvironmentSpec(kind="d", settings=settings),
        verifier=VerifierSpec(kind="exact_answer"),
    )


async def no_box(spec: object) -> Any:
    raise AssertionError


async def test_the_api_world_talks_to_its_user_and_keeps_an_audit_log() -> None:
    said: list[int] = []

    async def user(conversation: Any) -> Message:
        said.append(len(conversation))
        return Message(role="user", content="###STOP###" if len(said) == 2 else "Refund order 7, please.")

    context = EnvironmentContext(episode_id="e", seed=0, acquire=no_box, services={"user": user})
    world = run("concepts/environments.md")["RetailWorld"](problem(orders={"7": {"status": "delivered"}}), context)
    assert [m.content for m in await world.reset()] == ["Begin.", "Refund order 7, please."]
    assert "refunded" in (await world.step(Action(message=calls("refund", {"order": "7"})))).messages[0].content
    assert "only delivered" in (await world.step(Action(message=calls("refund", {"order": "7"})))).messages[0].content
    assert (await world.step(Action(message=says("Done.")))).done
    state = (await world.collect()).state
    assert state["orders"] == {"7": {"status": "refunded"}}
    assert [call["status"] for call in state["calls"]] == ["ok", "error"]


async def test_the_document_world_hands_out_its_pages_by_digest() -> None:
    context = EnvironmentContext(episode_id="e", seed=0, acquire=no_box)
    world = run("concepts/environments.md")["DocumentWorld"](problem(pages_hex=["89504e47", "ff"]), context)
    (message,) = await world.reset()
    assert [await world.attachment(shown.sha256) for shown in message.attachments] == [b"\x89PNG", b"\xff"]


async def test_the_terminal_world_carries_its_folder_along(bubblewrap_backend: SandboxBackend) -> None:
    context = EnvironmentContext(episode_id="e", seed=0, acquire=bubblewrap_backend.acquire)
    world = run("concepts/environments.md")["TerminalWorld"](problem(), context)
    await world.reset()
    try:
        await world.step(Action(message=calls("bash", {"command": "mkdir -p a/b && cd a/b && echo hello > note"})))
        step = await world.step(Action(message=calls("bash", {"command": "pwd; cat note; false"})))
        assert '"exit_code":1' in step.messages[0].content
        assert "/work/a/b\\nhello" in step.messages[0].content
    finally:
        await world.close()


async def test_the_refund_desk_has_its_services(bubblewrap_backend: SandboxBackend) -> None:
    context = EnvironmentContext(episode_id="e", seed=0, acquire=bubblewrap_backend.acquire)
    scope = run("howto/companion-services.md")
    world = scope["RefundDesk"](problem(), context)
    await world.reset()
    get = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], data=b'' if sys.argv[2:] else None).read())"
    try:
        for words, answer in (
            ("http://127.0.0.1/orders/7", "delivered"),
            ("http://127.0.0.1:8081/track?order=7", "2024-05-02"),
            ("http://127.0.0.1/orders/7/refund post", "refunded"),
        ):
            command = f'python3 -c "{get}" {words}'
            step = await world.step(Action(message=calls("bash", {"command": command})))
            assert answer in step.messages[0].content
        assert (await world.collect()).state["audit"] == '[["7", "/orders/7/refund"]]\n'
    finally:
        await world.close()


def test_the_table_of_domains_is_complete() -> None:
    from environments.registry import DOMAINS, VERIFIERS

    text = (DOCS / "concepts/environments.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in text for name in [*DOMAINS, *VERIFIERS])
