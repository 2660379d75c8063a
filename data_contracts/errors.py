"""One error tree. Every message says what happened, where, and what to do; every error pickles.

Each class is also a fitting standard type, so callers outside Bessemer can catch it without knowing us.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from data_contracts.records import InfraCause


class BessemerError(Exception):
    """Root of all errors that Bessemer raises on purpose."""


class InputError(BessemerError, ValueError):
    """Bad input, found before anything expensive starts. Names file, row, field, what was expected and the remedy."""

    def __init__(
        self,
        problem: str,
        *,
        file: str | None = None,
        row: int | None = None,
        field: str | None = None,
        remedy: str | None = None,
    ) -> None:
        self.problem, self.file, self.row, self.field, self.remedy = problem, file, row, field, remedy
        place = ", ".join(
            part
            for part in (
                file,
                f"row {row}" if row is not None else None,
                f"field '{field}'" if field is not None else None,
            )
            if part
        )
        text = f"{place}: {problem}" if place else problem
        super().__init__(f"{text}. {remedy}" if remedy else text)

    def __reduce__(self) -> tuple[object, ...]:
        return (_input_error, (type(self), self.problem, self.file, self.row, self.field, self.remedy))


def _input_error(
    kind: type[InputError], problem: str, file: str | None, row: int | None, field: str | None, remedy: str | None
) -> InputError:
    return kind(problem, file=file, row=row, field=field, remedy=remedy)


class ConfigError(InputError):
    """A profile, an override or an environment variable that does not fit."""


class ContractError(InputError):
    """A table that breaks its contract as a whole, or in too many groups: the iteration stops."""


class MissingRequirement(BessemerError, RuntimeError):
    """The host lacks something (bubblewrap, Docker's engine, weights). The message ends with the command that fixes it."""


class CapabilityError(BessemerError, RuntimeError):
    """A domain needs what the sandbox backend cannot enforce or offer. Raised before a run starts."""


class SandboxLost(BessemerError, RuntimeError):
    """The policy's own box is gone (it killed it, or ran out of its memory). This is the policy's failure."""


class InfraError(BessemerError, RuntimeError):
    """A positive infrastructure cause seen by the control plane; becomes an `infra_failure`, never a reward."""

    def __init__(self, cause: InfraCause, detail: str) -> None:
        self.cause, self.detail = cause, detail
        super().__init__(f"{cause}: {detail}")

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.cause, self.detail))


class VersionMismatch(InfraError):
    """An engine sampled from another policy version than the campaign asked for."""

    def __init__(self, detail: str) -> None:
        super().__init__("engine_stale", detail)

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.detail,))


class TooManyInfraFailures(BessemerError, RuntimeError):
    """More than the allowed share of groups failed for infrastructure reasons; the stage pauses and alerts."""


class CampaignHeld(BessemerError, RuntimeError):
    """Another advance holds the campaign: the message says which run and since when."""

    def __init__(self, campaign: str, holder: str, since: str) -> None:
        self.campaign, self.holder, self.since = campaign, holder, since
        super().__init__(f"campaign '{campaign}' is held by {holder} since {since}; wait for it, or stop that run first")

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.campaign, self.holder, self.since))


class StaleWriter(BessemerError, RuntimeError):
    """A writer whose epoch was passed by a newer lease tried to write to the ledger or to the trainer."""


class LedgerError(BessemerError, ValueError):
    """An event contradicts the campaign's ledger, or a ledger object is damaged: the message names it."""


class PublishRefused(BessemerError, RuntimeError):
    """No replica could prove that it serves the new weights."""


class TrainerError(BessemerError, RuntimeError):
    """The trainer refused or failed a job."""
