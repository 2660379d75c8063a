"""What the loop itself costs: one iteration of 64 and one of 256 episodes on the local stack, from the run's own report.

    python -m tests.benchmarks.overhead [--profile tiny] [--model smollm2-135m] [--set PATH=VALUE ...] [--keep]

Wall time is that of the iteration, from the moment its rollout could start until the next version is proven; useful time is the
union of its sampling, environment, grading, train-step and publish intervals; the rest is overhead. It is driven through the
Prefect flow, as every run is. Of three iterations of one size the middle one counts: the first warms every process, the last
also saves the optimizer state. Limits: 15 % of the wall at 64 episodes, 5 % at 256. Starts the stack in a temporary folder and
ends it; --keep: uses that of BESSEMER_HOME.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import uuid
from pathlib import Path

from data_contracts.profiles import load_profile
from infra import prefect_server
from infra import stack as local_stack
from tasks.report import IterationReport

LIMITS = {64: 0.15, 256: 0.05}
GROUP_SIZE = 16
PARTS = ("sampling", "environment", "grading", "train_step", "publish")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.overhead")
    parser.add_argument("--profile", default="tiny")
    parser.add_argument("--model", default="")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="PATH=VALUE")
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args(arguments)
    settings = [*options.overrides, *([f"campaign.base_model={options.model}"] if options.model else [])]
    if options.keep:
        return measure(options.profile, settings)
    with tempfile.TemporaryDirectory(prefix="bessemer-overhead-") as folder:
        os.environ["BESSEMER_HOME"] = folder
        try:
            return measure(options.profile, settings)
        finally:
            local_stack.down(Path(folder))


def measure(profile: str, settings: list[str]) -> int:
    from flows.stack import ensure
    from infra.paths import home

    places = ensure(
        load_profile(profile, settings), on_change=lambda change: print(f"{change.name}: {change.state}", file=sys.stderr)
    )
    os.environ["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"] = "CRITICAL"
    prefect_server.use(home(), api_url=places.prefect_api)
    print(f"load average {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores, profile {profile}")
    print("| episodes | wall s | " + " | ".join(PARTS) + " | union s | overhead s | share | limit |")
    print("|" + "---|" * (len(PARTS) + 6))
    good = True
    for episodes, limit in LIMITS.items():
        found = one(profile, settings, episodes).metrics
        share, wall, lost = found["overhead/share"], found["seconds/wall"], found["overhead/seconds"]
        cells = [f"{found.get(f'seconds/{part}', 0.0):.2f}" for part in PARTS]
        print(
            f"| {found['rollout/episodes']:.0f} | {wall:.2f} | {' | '.join(cells)} | {wall - lost:.2f} | {lost:.2f} "
            f"| {share:.1%} | {limit:.0%} |",
            flush=True,
        )
        good = good and share <= limit
    return 0 if good else 1


def one(profile: str, settings: list[str], episodes: int) -> IterationReport:
    """The report of the second of three iterations of a fresh campaign with `episodes` episodes an iteration."""
    from flows.campaign import Watcher, advance, watching

    reports: dict[int, IterationReport] = {}
    chosen = [
        *settings,
        "campaign.iterations=3",
        f"campaign.curate.groups={episodes // GROUP_SIZE}",
        f"campaign.rollout.group_size={GROUP_SIZE}",
        "campaign.rollout.drop_zero_variance=false",
        "campaign.evaluate.every=1000",
    ]
    with watching(Watcher(on_report=reports.__setitem__)):
        name = f"overhead-{episodes}-{uuid.uuid4().hex[:6]}"
        advance(profile=profile, campaign=name, overrides=chosen)
    return reports[1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
