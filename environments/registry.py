"""Name -> domain and kind -> verifier, imported when asked for.

Built-in ones are listed here. A third party adds its own with the entry point groups `bessemer.domains` (a Domain subclass
under its name) and `bessemer.verifiers` (a Verifier subclass under its kind), or is named as "module.path:ClassName" wherever
a name is expected, which needs no installation; such a domain's problems carry that path in `environment.kind`, so that every
process finds the class.
"""

from __future__ import annotations

import difflib
import importlib
from functools import cache
from importlib.metadata import entry_points

from data_contracts.errors import ConfigError, InputError
from data_contracts.records import Problem
from environments.base import Domain, Verifier

DOMAINS = {
    "arithmetic": "environments.domains.arithmetic:Arithmetic",
    "calculator": "environments.domains.calculator:Calculator",
    "code": "environments.domains.code:Code",
    "code_repair": "environments.domains.code_repair:CodeRepair",
    "echo": "environments.domains.echo:Echo",
    "orders": "environments.domains.orders:Orders",
}
VERIFIERS = {
    "business_rules": "environments.verifiers.business_rules:BusinessRules",
    "composite": "environments.verifiers.composite:Composite",
    "exact_answer": "environments.verifiers.exact_answer:ExactAnswer",
    "function_cases": "environments.verifiers.function_cases:FunctionCases",
    "proxied": "environments.verifiers.proxied:Proxied",
    "state_comparison": "environments.verifiers.state_comparison:StateComparison",
    "unit_tests": "environments.verifiers.unit_tests:UnitTests",
}


def domain_names() -> tuple[str, ...]:
    """All installed names, sorted; imports no domain."""
    return tuple(sorted(_targets("bessemer.domains", DOMAINS)))


def domains() -> dict[str, Domain]:
    """Every installed domain by name."""
    return {name: domain(name) for name in domain_names()}


@cache
def domain(name: str) -> Domain:
    """The domain of this name. Raises ConfigError naming the known ones and the closest match."""
    found = _load(name, _targets("bessemer.domains", DOMAINS), what="domain")
    if not (isinstance(found, type) and issubclass(found, Domain)):
        raise ConfigError(f"domain '{name}' is {found!r}, expected a subclass of environments.base.Domain", field="name")
    return found()


def domain_of(problem: Problem) -> Domain:
    """The domain that built a problem, also in another process: by class path when `environment.kind` is one, else by name."""
    kind = problem.environment.kind
    return domain(kind if ":" in kind else problem.domain)


@cache
def verifier(kind: str) -> Verifier:
    """The verifier of this kind. Raises ConfigError naming the known ones and the closest match."""
    found = _load(kind, _targets("bessemer.verifiers", VERIFIERS), what="verifier")
    if not (isinstance(found, type) and issubclass(found, Verifier)):
        raise ConfigError(f"verifier '{kind}' is {found!r}, expected a subclass of environments.base.Verifier", field="kind")
    return found()


def check_grading(problem: Problem) -> None:
    """Raises InputError for a problem that its verifier could not grade, would pass without cause, or by an opinion alone."""
    judge = verifier(problem.verifier.kind)
    if judge.opinion:
        raise InputError(
            f"'{judge.kind}' is an opinion, and nothing else is checked", field="verifier.kind",
            remedy="Make it a part of a 'composite' beside a verifier of facts",
        )  # fmt: skip
    judge.check(problem)


def _targets(group: str, built_in: dict[str, str]) -> dict[str, str]:
    """Name -> "module:Class"; a third party cannot take a built-in name."""
    return {point.name: point.value for point in entry_points(group=group)} | built_in


def _load(name: str, targets: dict[str, str], *, what: str) -> object:
    target = targets.get(name, name if ":" in name else None)
    field = "name" if what == "domain" else "kind"
    if target is None:
        close = difflib.get_close_matches(name, targets, n=1)
        hint = f"Did you mean '{close[0]}'? " if close else ""
        raise ConfigError(
            f"unknown {what} '{name}'",
            field=field,
            remedy=f"{hint}Known: {', '.join(sorted(targets))}; or name a class as 'module.path:ClassName'",
        )
    module, _, attribute = target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{what} '{name}' cannot be loaded from '{target}': {error}",
            field=field,
            remedy="Check the module path, the class name and that its package is installed",
        ) from error
