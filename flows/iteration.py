"""One iteration as a Prefect subflow. Its body is the campaign driver's; Prefect sees the iteration's tasks below it.

The driver may call this from several threads at once (staleness), each with a copy of the caller's context: Prefect 3.7.7 then
records the right parent (tests/flows/test_campaign.py). A subflow waits up to a second for its heartbeat thread when it ends.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

from prefect import flow

Body = Callable[[], None]
_body: ContextVar[Body] = ContextVar("bessemer_iteration_body")


@flow(
    name="iteration",
    flow_run_name="{campaign}: iteration {number}",
    retries=0,
    persist_result=False,
    validate_parameters=False,
    description="Curate, roll out, score, train, publish, evaluate: one iteration of a campaign.",
)
def iteration(campaign: str, number: int) -> None:
    _body.get()()


def run_as_subflow(campaign: str, number: int, body: Body) -> None:
    """Run `body` inside a subflow run of the current flow run."""
    token = _body.set(body)
    try:
        iteration(campaign, number)
    finally:
        _body.reset(token)
