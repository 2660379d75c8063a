"""Deploy against a real Prefect server: idempotent, and what left the file leaves Prefect."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from data_contracts.errors import ConfigError
from flows.deploy import deploy, read_file
from tests.plugins.prefect import PrefectServer

ROOT = Path(__file__).parents[2]


def entry(name: str, *, slugs: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "name": name,
        "entrypoint": "flows.campaign.advance",
        "parameters": {"profile": "tiny", "campaign": name},
        "schedules": [{"slug": slug, "cron": "0 3 * * *"} for slug in slugs],
        "concurrency_limit": {"limit": 1, "collision_strategy": "CANCEL_NEW"},
        "work_pool": {"name": "bessemer"},
    }


def write(folder: Path, *entries: dict[str, Any]) -> Path:
    file = folder / "prefect.yaml"
    file.write_text(yaml.safe_dump({"deployments": list(entries)}))
    return file


def deployed() -> dict[str, Any]:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        return {deployment.name: deployment for deployment in client.read_deployments()}


def test_what_left_the_file_leaves_prefect_and_a_second_call_changes_nothing(tmp_path: Path, prefect: PrefectServer) -> None:
    first = deploy(write(tmp_path, entry("night", slugs=("a", "b")), entry("other")), heartbeat_seconds=30)
    assert sorted(first.deployments) == ["advance/night", "advance/other"]
    before = deployed()["night"]
    assert before.concurrency_options.collision_strategy == "CANCEL_NEW"
    second = deploy(write(tmp_path, entry("night", slugs=("a",))), heartbeat_seconds=30)
    assert second.removed_deployments == ["other"]
    third = deploy(tmp_path / "prefect.yaml", heartbeat_seconds=30)
    assert set(third.automations.values()) == {"unchanged"}
    assert (third.removed_deployments, third.removed_schedules) == ([], [])
    after = deployed()
    assert "other" not in after
    assert after["night"].id == before.id
    assert [schedule.slug for schedule in after["night"].schedules] == ["a"]


def test_the_form_is_typed_and_described(tmp_path: Path, prefect: PrefectServer) -> None:
    deploy(write(tmp_path, entry("form")), heartbeat_seconds=30)
    schema = deployed()["form"].parameter_openapi_schema
    assert schema["required"] == ["profile", "campaign"]
    fields = schema["properties"]
    assert len(fields) == 13
    assert all(field.get("description") for field in fields.values())
    assert "integer" in str(fields["group_size"])


def test_automations_follow_the_heartbeat(tmp_path: Path, prefect: PrefectServer) -> None:
    from prefect.client.orchestration import get_client

    from infra.prefect_automations import ZOMBIE

    deploy(write(tmp_path, entry("night")), heartbeat_seconds=30)
    changed = deploy(tmp_path / "prefect.yaml", heartbeat_seconds=60)
    assert changed.automations[ZOMBIE] == "updated"
    with get_client(sync_client=True) as client:
        found = client.read_automations_by_name(ZOMBIE)
    assert [automation.trigger.within.total_seconds() for automation in found] == [180.0]
    deploy(tmp_path / "prefect.yaml", heartbeat_seconds=30)


def test_our_own_file_is_accepted_and_guards_against_overlap() -> None:
    nightly = read_file(ROOT / "prefect.yaml")[0]
    assert nightly["concurrency_limit"] == {"limit": 1, "collision_strategy": "CANCEL_NEW"}
    assert nightly["schedules"][0]["cron"] == "0 2 * * *"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cron": "0 2 * * *"}, r"deployments\[0\]\.cron'?: is not a key Bessemer applies"),
        ({"schedules": [{"slug": "x"}]}, r"deployments\[0\]\.schedules\[0\]'?: expected either cron or interval"),
        ({"work_pool": None}, r"deployments\[0\]\.work_pool'?: "),
    ],
)
def test_a_mistake_names_file_and_field(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    wrong = entry("night") | change
    wrong = {key: value for key, value in wrong.items() if value is not None}
    with pytest.raises(ConfigError, match=r"prefect\.yaml.*" + message):
        read_file(write(tmp_path, wrong))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: no such file"):
        read_file(tmp_path / "nowhere.yaml")
