"""The contract of problems: identity, a prompt, tools that are objects, budgets that nest, a verifier that exists."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import get_args

from data_contracts.records import Problem, Split, TrustLevel
from data_contracts.suites.rules import Columns, Rule, Suite, between, holds, one_of, unique

MAX_ID_CHARS, MAX_COUNT = 256, 10**9
_FIX = "Fix the problem in its source file or its domain's generator"


def suite(*, domains: Collection[str] = (), max_prompt_tokens: int | None = None) -> Suite:
    """`domains`: registered domains; empty leaves that rule out."""
    rules: list[Rule] = [
        unique("row_id", field="id", expected="an id that no other problem has", remedy="Give every problem its own id"),
        holds(
            "id_fits",
            field="id",
            expected="<domain>/<split>/<local id>, printable, at most 256 characters, no '..'",
            remedy="Rename the problem",
            shows="row_id",
        ),
        one_of("split", get_args(Split), remedy="Use train or heldout"),
        one_of("trust", get_args(TrustLevel), field="verifier.trust", remedy="Name one of the trust levels"),
        holds("difficulty_finite", field="difficulty", expected="a finite number", remedy=_FIX),
        between("messages", 1, None, expected="at least 1 message", remedy="Give the problem a prompt"),
        holds("prompt_filled", field="messages", expected="a prompt that is not empty", remedy=_FIX),
        one_of("last_role", ("user", "tool", "system"), field="messages", remedy="End the prompt before the assistant's turn"),
        holds("tools_are_objects", field="tools", expected="distinct names, JSON schemas of type object", remedy=_FIX),
        holds(
            "budgets_nest",
            field="budgets",
            expected="positive budgets; tool call <= all tool calls < life of the box; tokens per turn <= tokens per episode",
            remedy=_FIX,
        ),
        holds("kinds_named", field="environment.kind", expected="names of environment and verifier", remedy=_FIX),
    ]
    if domains:
        known = tuple(sorted(domains))
        rules.append(one_of("domain", known, remedy="Use a registered domain; `bessemer domains` lists them"))
    if max_prompt_tokens is not None:
        rules.append(
            between(
                "prompt_tokens",
                1,
                max_prompt_tokens,
                field="messages",
                expected=f"a prompt of at most {max_prompt_tokens} tokens",
                remedy="Shorten the prompt or raise campaign.curate.max_prompt_tokens",
            )
        )
    return Suite(table="problems", rules=tuple(rules))


def project(problems: Sequence[Problem], *, prompt_tokens: Mapping[str, int] | None = None) -> Columns:
    """One row a problem. `prompt_tokens`: problem id -> tokens of its first prompt, where they were counted."""
    counted = prompt_tokens or {}
    return {
        "row": list(range(1, len(problems) + 1)),
        "row_id": [p.id for p in problems],
        "group_id": [p.id for p in problems],
        "id_fits": [
            p.id.startswith(f"{p.domain}/{p.split}/")
            and p.id.isprintable()
            and len(p.id) <= MAX_ID_CHARS
            and all(part.strip() not in ("", ".", "..") for part in p.id.split("/"))
            for p in problems
        ],
        "domain": [p.domain for p in problems],
        "split": [p.split for p in problems],
        "trust": [p.verifier.trust for p in problems],
        "difficulty_finite": [math.isfinite(p.difficulty) for p in problems],
        "messages": [len(p.messages) for p in problems],
        "prompt_filled": [any(m.content.strip() for m in p.messages) for p in problems],
        "last_role": [p.messages[-1].role if p.messages else None for p in problems],
        "tools_are_objects": [
            len({t.name for t in p.tools}) == len(p.tools) and all(t.parameters.get("type") == "object" for t in p.tools)
            for p in problems
        ],
        "budgets_nest": [_budgets_nest(p) for p in problems],
        "kinds_named": [bool(p.environment.kind) and bool(p.verifier.kind) for p in problems],
        "prompt_tokens": [counted.get(p.id) for p in problems],
    }


def _budgets_nest(problem: Problem) -> bool:
    b = problem.budgets
    numbers = (b.max_turns, b.max_tokens_per_turn, b.max_episode_tokens, b.tool_call_seconds, b.tool_seconds_total)
    positive = all(math.isfinite(n) and n > 0 for n in numbers) and b.max_tool_calls >= 0
    counts = (b.max_turns, b.max_tokens_per_turn, b.max_episode_tokens, b.max_tool_calls, problem.verifier.collect_max_bytes)
    box = problem.environment.sandbox  # one that ends before the policy's time does would look like an outage
    lives = box is None or box.limits.lifetime_seconds > b.tool_seconds_total
    positive = positive and lives and all(0 <= count <= MAX_COUNT for count in counts)
    return positive and b.tool_call_seconds <= b.tool_seconds_total and b.max_tokens_per_turn <= b.max_episode_tokens
