"""The automations that `bessemer deploy` installs in Prefect: zombie, crash, failure.

A flow run whose process was killed stays Running for ever unless somebody notices: the zombie automation marks a run Crashed
when it has sent a heartbeat and then nothing (no heartbeat, no change to a state that sends none) for three of them. That also
gives its deployment slot back. Crash and failure are alerts: an automation event in Prefect's feed, and a notification when a
block is named. All three look only at runs tagged `bessemer`. Method: Prefect's guide on detecting zombie flows, with suspended
and paused runs added, which send no heartbeats.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from data_contracts.errors import InputError

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.events.schemas.automations import AutomationCore

TAG = "bessemer"
MISSED_HEARTBEATS = 3
ZOMBIE, CRASH, FAILURE = "bessemer: zombie runs", "bessemer: crashed runs", "bessemer: failed runs"
SILENT_STATES = (
    "Completed",
    "Failed",
    "Cancelled",
    "Crashed",
    "Cancelling",
    "Suspended",
    "Paused",
    "AwaitingRetry",
    "Scheduled",
)
"""States in which a run sends no heartbeats: reaching one of them is not a crash."""


def automations(*, heartbeat_seconds: int, notification_block: str | None = None) -> list[AutomationCore]:
    """The three automations. `notification_block` is the id of a Prefect notification block document."""
    from prefect.client.schemas.objects import StateType
    from prefect.events.actions import ChangeFlowRunState
    from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

    ours: dict[str, Any] = {
        "match": {"prefect.resource.id": "prefect.flow-run.*"},
        "match_related": {"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{TAG}"},
        "for_each": {"prefect.resource.id"},
    }
    seconds = MISSED_HEARTBEATS * heartbeat_seconds
    zombie = AutomationCore(
        name=ZOMBIE,
        description=f"Marks a run Crashed that was silent for {seconds} s ({MISSED_HEARTBEATS} heartbeats).",
        tags=[TAG],
        trigger=EventTrigger(
            **ours,
            after={"prefect.flow-run.heartbeat"},
            expect={"prefect.flow-run.heartbeat", *(f"prefect.flow-run.{state}" for state in SILENT_STATES)},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=seconds),
        ),
        actions=[
            ChangeFlowRunState(
                state=StateType.CRASHED,
                name="Crashed",
                message=f"No heartbeat for {seconds} s: its process is gone. Run it again to continue the campaign.",
                force=True,
            )
        ],
    )
    return [
        zombie,
        *(_alert(name, state, ours, notification_block) for name, state in ((CRASH, "Crashed"), (FAILURE, "Failed"))),
    ]


def install(client: SyncPrefectClient, *, heartbeat_seconds: int, notification_block: str | None = None) -> dict[str, str]:
    """Create or update the automations, by name; doubles are removed. Returns name -> "created" | "updated" | "unchanged"."""
    outcome = {}
    for wanted in automations(heartbeat_seconds=heartbeat_seconds, notification_block=notification_block):
        existing = client.read_automations_by_name(wanted.name)
        for double in existing[1:]:
            client.delete_automation(double.id)
        if not existing:
            client.create_automation(wanted)
            outcome[wanted.name] = "created"
        elif _essence(existing[0]) != _essence(wanted):
            client.update_automation(existing[0].id, wanted)
            outcome[wanted.name] = "updated"
        else:
            outcome[wanted.name] = "unchanged"
    return outcome


def find_notification_block(client: SyncPrefectClient, name: str) -> str:
    """Id of the notification block "type-slug/name". Raises InputError when Prefect has no such block."""
    from prefect.exceptions import ObjectNotFound

    kind, _, block = name.partition("/")
    try:
        return str(client.read_block_document_by_name(block, kind).id)
    except ObjectNotFound:
        remedy = f"Create it in the Prefect UI (Blocks), or leave --notify out; expected TYPE/NAME, got '{name}'"
        raise InputError("Prefect has no such notification block", field="--notify", remedy=remedy) from None


def _alert(name: str, state: str, ours: dict[str, Any], block: str | None) -> AutomationCore:
    from prefect.events.actions import DoNothing, SendNotification
    from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

    body = "{{ flow.name }} run {{ flow_run.name }} entered {{ flow_run.state.name }}: {{ flow_run.state.message }}"
    return AutomationCore(
        name=name,
        description=f"A run entered {state}: an event in the feed, and a notification when a block was named.",
        tags=[TAG],
        trigger=EventTrigger(
            **ours, expect={f"prefect.flow-run.{state}"}, posture=Posture.Reactive, threshold=1, within=timedelta(0)
        ),
        actions=[
            SendNotification.model_validate({"block_document_id": block, "subject": name, "body": body})
            if block
            else DoNothing()
        ],
    )


def _essence(automation: AutomationCore) -> dict[str, Any]:
    """What we set, without ids and times that the server adds."""
    chosen = automation.model_dump(mode="json", include={"name", "description", "trigger", "actions", "tags"})
    trigger = chosen["trigger"]
    trigger.pop("id", None)
    for field in ("after", "expect", "for_each"):
        trigger[field] = sorted(trigger.get(field) or ())
    return chosen
