"""Builds the root file systems that domains declare (`Domain.images`): a step of the set-up after the project is installed.

Shipped domains need "base" only, so that this costs nothing until a domain with another one is installed. A box whose variant
was not built is refused with the command that builds it.

    python -m environments.images [--docker] [DOMAIN ...]
"""

from __future__ import annotations

import argparse
import sys

from data_contracts.errors import BessemerError
from environments.registry import domain, domain_names
from infra.rootfs import prepare


def declared(names: list[str]) -> list[str]:
    """The variants of these domains (of all when none is named), "base" first. Raises ConfigError for an unknown domain."""
    found = {image for name in names or domain_names() for image in domain(name).images}
    return ["base", *sorted(found - {"base"})]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m environments.images", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--docker", action="store_true", help="also import them into Docker's engine")
    parser.add_argument("domains", nargs="*", metavar="DOMAIN", help="default: every installed one")
    chosen = parser.parse_args(arguments)

    def progress(message: str) -> None:
        sys.stdout.write(f"images: {message}\n")
        sys.stdout.flush()

    try:
        prepare(declared(chosen.domains), docker=chosen.docker, progress=progress)
    except BessemerError as error:
        sys.stderr.write(f"images: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
