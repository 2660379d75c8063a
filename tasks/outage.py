"""When the boxes' backend is away: which groups wait, when they are sent again, when the run gives up. Time is passed in.

A group that met the outage (cause `sandbox_unreachable`) is run again whole from its start, and this is none of its retries:
the policy can cause no outage, and every group that met one is run until it is graded, so which groups are in the batch, and
what they hold, does not depend on it. Sent again too early, a group costs its worker one question to the backend and no token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

CAUSE = "sandbox_unreachable"
FIRST_SECONDS = 1.0
LONGEST_SECONDS = 30.0
SAY_SECONDS = 10.0


@dataclass(kw_only=True)
class Outage:
    """`budget` seconds may be waited at a stretch. Times are of one monotonic clock."""

    budget: float
    since: float | None = None
    """Since when it has lasted; None while the backend answers."""
    waited: float = 0.0
    """Seconds of the stretches that are over."""
    reason: str = ""
    _held: set[int] = field(default_factory=set)
    _pause: float = FIRST_SECONDS
    _again: float = 0.0
    _said: float = 0.0

    def meet(self, order: int, reason: str, *, now: float) -> None:
        """A group came back because of it."""
        self._held.add(order)
        self.reason = reason.removeprefix(f"{CAUSE}: ")
        if self.since is None:
            self.since, self._pause, self._said = now, FIRST_SECONDS, float("-inf")
            self._again = now + self._pause

    def release(self, *, now: float) -> list[int]:
        """The groups to send again now; when that is too early, they come back and wait longer."""
        if not self._held or now < self._again:
            return []
        self._pause = min(2 * self._pause, LONGEST_SECONDS)
        self._again = now + self._pause
        released = sorted(self._held)
        self._held.clear()
        return released

    def end(self, *, now: float) -> float:
        """A group was over for another reason: the backend answers. How long it was away, 0.0 when it was not."""
        if self.since is None:
            return 0.0
        lasted, self.since = now - self.since, None
        self.waited += lasted
        self._again = now
        return lasted

    def given_up(self, *, now: float) -> bool:
        """To be asked when a group has just come back: a group that is still at work may show that it is over."""
        return self.since is not None and now - self.since > self.budget

    def pause(self, *, now: float) -> float:
        """Seconds until something may be sent again."""
        return max(self._again - now, 0.0) if self._held else float("inf")

    def extension(self, *, now: float) -> float:
        """Seconds by which the stage's deadline moves: what was waited, at most one budget, so that the stage ends."""
        return min(self.waited + (now - self.since if self.since is not None else 0.0), self.budget)

    def message(self, *, campaign: str, groups: int, now: float) -> str | None:
        """For people: what waits, for how long, and what to do. None when that was said a moment ago."""
        if self.since is None or now - self._said < SAY_SECONDS:
            return None
        self._said, lasted = now, now - self.since
        return (
            f"campaign '{campaign}' waits, the sandbox backend is away: {self.reason}. {len(self._held)} of {groups} groups are"
            f" held and will be run again from their start; nothing was scored. Waited {lasted:.0f} s of at most"
            f" {self.budget:g} s (stack.sandbox.outage_wait_seconds)"
        )
