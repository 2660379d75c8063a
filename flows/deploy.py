"""Deploy: make Prefect hold exactly what prefect.yaml says, and our automations. Calling it again changes nothing.

The file is Prefect's own format, restricted to the keys in `DEPLOYMENT_KEYS` (others are refused with a clear error, never
ignored). Deployments tagged `bessemer` that left the file are deleted, and so are schedules that left a deployment, which
Prefect's own `deploy` keeps. Runs start in the folder of prefect.yaml.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from data_contracts.errors import ConfigError

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.actions import DeploymentScheduleCreate

TAG = "bessemer"
DEPLOYMENT_KEYS = {
    "name",
    "description",
    "entrypoint",
    "tags",
    "parameters",
    "schedules",
    "concurrency_limit",
    "enforce_parameter_schema",
    "work_pool",
    "version",
}
SCHEDULE_KEYS = {"slug", "cron", "interval", "timezone", "active", "parameters", "day_or"}


class Deployed(NamedTuple):
    """What one `deploy` did, as lines for people."""

    deployments: list[str]
    removed_deployments: list[str]
    removed_schedules: list[str]
    automations: dict[str, str]


def deploy(file: Path, *, heartbeat_seconds: int, notify: str | None = None) -> Deployed:
    """Apply `file` to the Prefect server of PREFECT_API_URL. Raises ConfigError, naming file and field, before any change."""
    from prefect.client.orchestration import get_client

    from infra import prefect_automations

    wanted = read_file(file)
    with get_client(sync_client=True) as client:
        block = prefect_automations.find_notification_block(client, notify) if notify else None
        applied, kept, dropped_schedules = [], set(), []
        for entry in wanted:
            name, identifier, dropped = _apply(client, entry, folder=file.resolve().parent)
            applied.append(name)
            kept.add(identifier)
            dropped_schedules += dropped
        removed = _remove_others(client, kept)
        installed = prefect_automations.install(client, heartbeat_seconds=heartbeat_seconds, notification_block=block)
    return Deployed(applied, removed, dropped_schedules, installed)


def read_file(file: Path) -> list[dict[str, Any]]:
    """The deployments of a prefect.yaml, checked. Raises ConfigError."""
    import yaml

    try:
        content = yaml.safe_load(file.read_text())
    except FileNotFoundError:
        remedy = "Run `bessemer deploy` where prefect.yaml lies, or give --file"
        raise ConfigError("no such file", file=str(file), remedy=remedy) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"not YAML: {error}", file=str(file)) from None
    entries = content.get("deployments") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError("expected a list of at least one deployment", file=str(file), field="deployments")
    names: set[str] = set()
    for index, entry in enumerate(entries):
        _check(entry, DEPLOYMENT_KEYS, ("name", "entrypoint", "work_pool"), file=file, field=f"deployments[{index}]")
        if entry["name"] in names:
            raise ConfigError(f"'{entry['name']}' appears twice", file=str(file), field=f"deployments[{index}].name")
        names.add(entry["name"])
        for position, schedule in enumerate(entry.get("schedules") or []):
            place = f"deployments[{index}].schedules[{position}]"
            _check(schedule, SCHEDULE_KEYS, (), file=file, field=place)
            if ("cron" in schedule) == ("interval" in schedule):
                raise ConfigError("expected either cron or interval (seconds)", file=str(file), field=place)
    return entries


def _check(entry: Any, known: set[str], needed: tuple[str, ...], *, file: Path, field: str) -> None:
    if not isinstance(entry, dict):
        raise ConfigError("expected a mapping", file=str(file), field=field)
    for key in needed:
        if key not in entry:
            raise ConfigError("is missing", file=str(file), field=f"{field}.{key}")
    for key in entry:
        if key not in known:
            remedy = f"Known: {', '.join(sorted(known))}"
            raise ConfigError("is not a key Bessemer applies", file=str(file), field=f"{field}.{key}", remedy=remedy)


def _apply(client: SyncPrefectClient, entry: Mapping[str, Any], *, folder: Path) -> tuple[str, Any, list[str]]:
    """Create or update one deployment; returns its full name, id and the names of schedules removed."""
    from prefect.client.schemas.objects import ConcurrencyOptions
    from prefect.flows import load_flow_from_entrypoint
    from prefect.utilities.callables import parameter_schema

    flow: Any = load_flow_from_entrypoint(entry["entrypoint"])
    pool = entry["work_pool"]
    ensure_work_pool(client, pool["name"])
    limit = entry.get("concurrency_limit")
    options = None
    if isinstance(limit, dict) and "collision_strategy" in limit:
        options = ConcurrencyOptions(collision_strategy=limit["collision_strategy"])
    schedules = [_schedule(schedule) for schedule in entry.get("schedules") or []]
    identifier = client.create_deployment(
        flow_id=client.create_flow(flow),
        name=entry["name"],
        version=entry.get("version"),
        description=entry.get("description"),
        tags=sorted({TAG, *entry.get("tags", ())}),
        parameters=entry.get("parameters") or {},
        schedules=schedules,
        concurrency_limit=limit.get("limit") if isinstance(limit, dict) else limit,
        concurrency_options=options,
        entrypoint=entry["entrypoint"],
        path=str(folder),
        pull_steps=[{"prefect.deployments.steps.set_working_directory": {"directory": str(folder)}}],
        parameter_openapi_schema=parameter_schema(flow).model_dump(),
        enforce_parameter_schema=entry.get("enforce_parameter_schema", True),
        work_pool_name=pool["name"],
        job_variables=pool.get("job_variables") or {},
    )
    full_name = f"{flow.name}/{entry['name']}"
    slugs = {schedule.slug for schedule in schedules}
    removed = []
    for schedule in client.read_deployment_schedules(identifier):
        if schedule.slug not in slugs:
            client.delete_deployment_schedule(identifier, schedule.id)
            removed.append(f"{full_name}: {schedule.slug or schedule.schedule}")
    return full_name, identifier, removed


def _schedule(entry: Mapping[str, Any]) -> DeploymentScheduleCreate:
    from datetime import timedelta

    from prefect.client.schemas.actions import DeploymentScheduleCreate
    from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule

    zone = entry.get("timezone", "UTC")
    when = (
        CronSchedule(cron=entry["cron"], timezone=zone, day_or=entry.get("day_or", True))
        if "cron" in entry
        else IntervalSchedule(interval=timedelta(seconds=entry["interval"]), timezone=zone)
    )
    slug = entry.get("slug") or "every-" + "".join(
        c if c.isalnum() else "-" for c in str(entry.get("cron", entry.get("interval")))
    )
    return DeploymentScheduleCreate(
        schedule=when, active=entry.get("active", True), slug=slug, parameters=entry.get("parameters") or {}
    )


def ensure_work_pool(client: SyncPrefectClient, name: str) -> None:
    """A process work pool called `name`; an existing one is left as it is."""
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound

    try:
        client.read_work_pool(name)
    except ObjectNotFound:
        try:
            client.create_work_pool(WorkPoolCreate(name=name, type="process", description="Flow runs of Bessemer"))
        except ObjectAlreadyExists:
            return


def _remove_others(client: SyncPrefectClient, kept: set[Any]) -> list[str]:
    """Delete deployments that carry our tag and are not in the file."""
    from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterTags

    removed = []
    ours = DeploymentFilter(tags=DeploymentFilterTags(all_=[TAG]))
    for deployment in client.read_deployments(deployment_filter=ours):
        if deployment.id not in kept:
            client.delete_deployment(deployment.id)
            removed.append(deployment.name)
    return removed
