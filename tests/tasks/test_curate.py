from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from data_contracts.config import CampaignConfig
from data_contracts.errors import ConfigError, InputError
from data_contracts.profiles import load_profile, profile_names
from data_contracts.records import Problem
from data_contracts.tables import read_problem_set
from tasks.curate import Curation, curate, heldout
from tests.data_contracts.samples import DictStore
from tests.tasks.bad_inputs import lines, row

TWO = [{"name": "arithmetic", "weight": 3}, {"name": "echo", "weight": 1}]


def config(domains: list[dict[str, Any]] = TWO, **curate_settings: Any) -> CampaignConfig:
    settings = {"groups": 8, "surplus": 8} | curate_settings
    return CampaignConfig.model_validate({"domains": domains, "curate": settings})


def draw(
    conf: CampaignConfig, *, iteration: int = 0, state: dict[str, Any] | None = None, **more: Any
) -> tuple[Curation, tuple[Problem, ...]]:
    store = DictStore()
    arguments: dict[str, Any] = {"success": {}} | more
    done = curate(conf, iteration=iteration, sampler_state=state or {}, store=store, key="problems.jsonl", **arguments)
    return done, read_problem_set(store, done.problems)


def ids(problems: tuple[Problem, ...]) -> list[str]:
    return [problem.id for problem in problems]


def test_domains_come_by_weight_and_every_beginning_is_balanced() -> None:
    done, problems = draw(config())
    assert len(problems) == 16
    assert done.drawn == {"arithmetic": 12, "echo": 4}
    for stop in (4, 8, 12):
        assert Counter(p.domain for p in problems[:stop])["echo"] == stop // 4
    assert len(set(ids(problems))) == 16
    assert {p.split for p in problems} == {"train"}
    assert done.skipped == {}


@pytest.mark.parametrize("name", profile_names())
def test_every_shipped_profile_has_problems_for_two_iterations(name: str) -> None:
    conf = load_profile(name).campaign
    first, problems = draw(conf)
    assert len(problems) == conf.curate.groups + conf.curate.surplus
    assert set(first.drawn) == {settings.name for settings in conf.domains}
    assert first.skipped == {}
    draw(conf, iteration=1, state=first.sampler_state)
    assert len(heldout(conf)) == sum(settings.heldout for settings in conf.domains)


def test_the_same_call_gives_the_same_bytes_and_the_state_moves_on() -> None:
    first, problems = draw(config())
    again, _ = draw(config())
    assert again == first
    assert json.loads(json.dumps(first.sampler_state)) == first.sampler_state
    assert len(json.dumps(first.sampler_state)) < 200
    second, later = draw(config(), iteration=1, state=first.sampler_state)
    assert not set(ids(later)) & set(ids(problems))
    assert second.problems.sha256 != first.problems.sha256


def test_unused_problems_come_back_first() -> None:
    first, problems = draw(config())
    _, later = draw(config(), iteration=1, state=first.sampler_state, unused=ids(problems)[8:])
    assert set(ids(later)[:8]) == set(ids(problems)[8:])
    assert len(set(ids(later)) - set(ids(problems))) == 8


def test_the_curriculum_prefers_mixed_success_and_always_explores() -> None:
    conf = config([{"name": "arithmetic"}], groups=20, surplus=20)
    first, problems = draw(conf)
    rewards = [0.0, 1.0, 0.5, 0.4]
    success = {problem.id: rewards[i % 4] for i, problem in enumerate(problems)}
    repeats: Counter[float] = Counter()
    for iteration in range(1, 20):
        _, later = draw(conf, iteration=iteration, state=first.sampler_state, success=success)
        again = [success[name] for name in ids(later) if name in success]
        assert len(again) == 20, "half of the draws are new problems"
        repeats.update(again)
    hopeful, hopeless = repeats[0.5] + repeats[0.4], repeats[0.0] + repeats[1.0]
    assert hopeful > 4 * hopeless > 0
    _, plain = draw(
        conf.model_copy(update={"curate": conf.curate.model_copy(update={"curriculum": False})}),
        state=first.sampler_state,
        success=success,
    )
    assert not set(ids(plain)) & set(success)


def test_a_stream_that_ends_starts_again() -> None:
    conf = config([{"name": "echo", "settings": {"letters": 8}}], groups=300, surplus=100)
    state: dict[str, Any] = {}
    for iteration in range(3):
        done, problems = draw(conf, iteration=iteration, state=state)
        state = done.sampler_state
        assert len(set(ids(problems))) == 400
    assert draw(conf, iteration=3, state=state)[0].sampler_state == state


def test_held_out_problems_are_fixed_and_no_train_problem_repeats_one(tmp_path: Path) -> None:
    conf = config([{"name": "arithmetic", "heldout": 5}])
    fixed = heldout(conf)
    assert len(fixed) == 5
    assert fixed == heldout(conf)
    assert {p.split for p in fixed} == {"heldout"}
    leak = {"role": "user", "content": "  " + fixed[2].messages[-1].content.upper().replace(" ", "\n")}
    (tmp_path / "p.jsonl").write_bytes(lines(row(0, messages=[leak]), row(1), row(2, messages=row(1)["messages"])))
    done, problems = draw(config([{"name": "arithmetic", "heldout": 5}], sources=[str(tmp_path / "p.jsonl")]))
    assert done.skipped == {"duplicate": 1, "held_out": 1}
    assert "arithmetic/train/0" not in ids(problems)
    assert len({"arithmetic/train/1", "arithmetic/train/2"} & set(ids(problems))) == 1


def test_held_out_rows_of_a_file_come_before_the_generator(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_bytes(lines(row(0, split="heldout", id="arithmetic/heldout/mine"), row(1)))
    fixed = heldout(config([{"name": "arithmetic", "heldout": 3}], sources=[str(tmp_path / "p.jsonl")]))
    assert fixed[0].id == "arithmetic/heldout/mine"
    assert len(fixed) == 3


def test_prompts_beyond_the_budget_are_left_out_and_counted() -> None:
    def length(problem: Problem) -> int:
        return len(problem.messages[-1].content)

    _, problems = draw(config())
    bound = sorted(length(p) for p in problems if p.domain == "arithmetic")[4]
    done, short = draw(config(max_prompt_tokens=max(16, bound)), count_tokens=length)
    assert all(length(problem) <= max(16, bound) for problem in short)
    assert set(done.skipped) <= {"prompt_too_long"}
    conf = config()
    tight = conf.model_copy(update={"rollout": conf.rollout.model_copy(update={"max_episode_tokens": 10})})
    with pytest.raises(ConfigError, match=r"only \d+ problems are left for 8 groups .*no_room_for_a_turn"):
        draw(tight, count_tokens=length)
    with pytest.raises(ConfigError, match="no_room_for_a_turn"):
        draw(conf, count_tokens=length, context_tokens=10)


def test_bad_sources_and_unknown_domains_stop_before_anything_else(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_bytes(lines(row(0, domain="aritmetic", id="aritmetic/train/0")))
    with pytest.raises(
        InputError, match=r"p\.jsonl, row 1, field 'domain': unknown domain 'aritmetic'\. Did you mean 'arithmetic'"
    ):
        draw(config(sources=[str(tmp_path / "p.jsonl")]))
    with pytest.raises(ConfigError, match=r"unknown domain 'ecko'\. Did you mean 'echo'"):
        draw(config([{"name": "ecko"}]))
