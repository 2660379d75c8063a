from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from data_contracts.errors import ConfigError
from data_contracts.profiles import load_profile, profile_names


@pytest.mark.parametrize("name", profile_names())
def test_every_shipped_profile_loads(name: str) -> None:
    assert load_profile(name).campaign.domains


def test_the_three_profiles_are_shipped() -> None:
    assert {"demo", "nightly", "tiny"} <= set(profile_names())


def test_overrides_by_text_by_mapping_and_into_lists() -> None:
    profile = load_profile(
        "demo", ["campaign.train.learning_rate=1e-5", "domains.0.weight=3", "stack.engine.addresses=[http://a:1]", "seed=4"]
    )
    assert profile.campaign.train.learning_rate == 1e-5
    assert profile.campaign.domains[0].weight == 3
    assert profile.campaign.seed == 4
    assert profile.stack.engine.addresses == ["http://a:1"]
    assert load_profile("demo", {"campaign.train.learning_rate": 1e-5}).campaign.train.learning_rate == 1e-5
    assert load_profile("demo", ["algorithm.tis_cap=null"]).campaign.algorithm.tis_cap is None


FILES = {
    "unknown.yaml": (
        "campaign: {domains: [{name: echo}], rollout: {group_sise: 4}}",
        "field 'campaign.rollout.group_sise'",
        "Did you mean 'group_size'?",
    ),
    "type.yaml": (
        "campaign: {domains: [{name: echo}], iterations: many}",
        "field 'campaign.iterations'",
        "got 'many'. iterations is: iterations a plain",
    ),
    "range.yaml": (
        "campaign: {domains: [{name: echo, weight: 0}]}",
        "field 'campaign.domains.0.weight'",
        "greater than 0, got 0",
    ),
    "missing.yaml": (
        "campaign: {seed: 1}",
        "field 'campaign.domains'",
        "the field is missing. Add it. domains is: what the policy learns",
    ),
    "twice.yaml": ("campaign:\n  seed: 1\n  seed: 2\n", "row 3", "the key 'seed' is given twice"),
    "broken.yaml": ("campaign: [\n", "row 2", "is not YAML"),
    "list.yaml": ("- campaign", "list.yaml", "expected a mapping with 'campaign'"),
}


@pytest.mark.parametrize("name", FILES)
def test_every_mistake_in_a_file_names_file_field_and_remedy(name: str, tmp_path: Path) -> None:
    text, place, says = FILES[name]
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_profile(str(tmp_path / name))
    assert str(tmp_path / name) in str(caught.value)
    assert place in str(caught.value)
    assert says in str(caught.value)


def test_a_file_in_another_encoding(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_bytes("campaign: {base_model: é}".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"p\.yaml: is not UTF-8 \(byte 23\)\. Save the file in UTF-8"):
        load_profile(str(tmp_path / "p.yaml"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "train.lerning_rate=1",
            r"demo\.yaml with train\.lerning_rate set, field 'campaign\.train\.lerning_rate': there is no such",
        ),
        ("train", "'train' is not an override. Write dotted.path=value"),
        ("domains.7.weight=1", "'7' is not one of the 3 entries. Entries count from 0"),
        ("seed.x=1", "'campaign.seed' is a value, not a section"),
        ("rollout.temperature=0", r"field 'campaign\.rollout\.temperature'"),
        ("rollout.stage_seconds=.inf", "should be a finite number"),
        ("reward.high=.nan", "should be a finite number"),
        ("domains.\u00b2=1", "is not one of the 3 entries"),
        ("seed=" + "1" * 5000, "the value of 'seed=1+' is not YAML"),
        ("seed=" + "[" * 3000, "the value of 'seed=\\[+' is not YAML"),
        ("seed=[", "the value of 'seed=\\[' is not YAML"),
    ],
)
def test_every_mistake_in_an_override_is_explained(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_profile("demo", [override])


@pytest.mark.parametrize(
    "text",
    [
        "? [a, b]\n: c\n", "campaign: " + "[" * 3000, "campaign: {seed: " + "1" * 5000 + "}", "campaign: &a {x: *a}\n",
        "".join(f"{name}: &{name} [{', '.join(['*' + last] * 9)}]\n" for last, name in pairwise("abcdefghijk")),
        "campaign: !!python/object/apply:os.system [id]", 'campaign: {seed: "a\0b"}',
    ],
)  # fmt: skip
def test_a_hostile_file_is_a_short_message(tmp_path: Path, text: str) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(text if "*a, *a" not in text else "a: &a [x]\n" + text)
    with pytest.raises(ConfigError) as caught:
        load_profile(str(file))
    assert len(str(caught.value)) < 600


def test_an_unknown_profile_names_the_closest() -> None:
    with pytest.raises(ConfigError, match=r"there is no profile 'demmo'\. Did you mean 'demo'\? Known: "):
        load_profile("demmo")
    with pytest.raises(ConfigError, match=r"nowhere\.yaml, field 'profile': there is no such file"):
        load_profile("nowhere.yaml")
