import sys
import types

import msgspec
import pytest

from data_contracts.errors import ConfigError
from data_contracts.records import EnvironmentSpec
from environments import registry
from environments.domains.echo import Echo


def test_every_built_in_domain_and_verifier_loads_under_its_own_name() -> None:
    for name, domain in registry.domains().items():
        assert domain.name == name
        assert domain.summary
        assert "default" in domain.levels
    for kind in registry.VERIFIERS:
        assert registry.verifier(kind).kind == kind


def test_names_are_listed_without_importing_a_domain() -> None:
    assert set(registry.DOMAINS) <= set(registry.domain_names())
    assert registry.domain("echo") is registry.domain("echo")


@pytest.mark.parametrize(("wrong", "close"), [("arithmetics", "arithmetic"), ("code-repair", "code_repair")])
def test_an_unknown_domain_is_refused_with_the_closest_name(wrong: str, close: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown domain '{wrong}'.*Did you mean '{close}'.*calculator"):
        registry.domain(wrong)


def test_an_unknown_verifier_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown verifier 'exact'.*exact_answer"):
        registry.verifier("exact")


def test_a_class_path_names_a_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("their_domains")
    module.Theirs = type("Theirs", (Echo,), {"name": "theirs"})  # type: ignore[attr-defined]
    module.NotOne = int  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "their_domains", module)
    assert registry.domain("their_domains:Theirs").name == "theirs"
    with pytest.raises(ConfigError, match="expected a subclass"):
        registry.domain("their_domains:NotOne")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        registry.domain("their_domains:Missing")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        registry.domain("no_such_module_at_all:Domain")


def test_an_entry_point_adds_a_domain_but_never_replaces_a_built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [types.SimpleNamespace(name=name, value="their_domains:Theirs") for name in ("theirs", "echo")]
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == "bessemer.domains" else [])
    assert "theirs" in registry.domain_names()
    assert type(registry.domain("echo")) is Echo


def test_a_problem_leads_back_to_its_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = next(registry.domain("echo").problems("train", seed=0))
    assert registry.domain_of(problem) is registry.domain("echo")
    module = types.ModuleType("her_domains")
    module.Hers = type("Hers", (Echo,), {"name": "hers"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "her_domains", module)
    hers = msgspec.structs.replace(problem, domain="hers", environment=EnvironmentSpec(kind="her_domains:Hers"))
    assert registry.domain_of(hers).name == "hers"
