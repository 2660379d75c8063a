"""What Prefect costs an iteration: the same empty stages driven with and without it. Prints one line a figure.

    python -m tests.flows.overhead [iterations]

Starts its own Prefect server in a temporary folder. Figures: docs/results/prefect.md.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

from infra import prefect_server, processes


def main(iterations: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        spec = prefect_server.server_spec(home, port=processes.free_port())
        log = home / "logs" / "prefect.log"
        began = time.perf_counter()
        process = processes.start(spec, log=log, owner=str(home))
        try:
            processes.wait_healthy(process, spec, log=log)
            print(f"server start              {time.perf_counter() - began:8.2f} s")
            os.environ["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"] = "CRITICAL"
            prefect_server.use(home, api_url=f"{spec.address}/api")
            measure(home, f"{spec.address}/api", iterations)
        finally:
            processes.stop(process, spec, owner=str(home))


def measure(home: Path, api_url: str, iterations: int) -> None:
    import flows.services
    from data_contracts.profiles import load_profile
    from flows.campaign import advance
    from infra.store import LocalStore
    from tasks.campaign import advance as drive
    from tasks.campaign import open_or_create
    from tests.flows import double

    flows.services.open_services = double.open_double  # type: ignore[assignment]

    store = LocalStore(home / "store")
    config = load_profile(str(double.PROFILE)).campaign
    plain = open_or_create(store, "plain", config, lambda: double.checkpoint("plain", 0))
    began = time.perf_counter()
    drive(plain, double.Double(store, "plain", lambda *_: None), until=iterations)
    bare = (time.perf_counter() - began) / iterations
    print(f"iteration without Prefect {bare:8.3f} s")

    def flow(campaign: str, number: int) -> float:
        start = time.perf_counter()
        advance(profile=str(double.PROFILE), campaign=campaign, iterations=number, overrides=[f"stack.prefect_api={api_url}"])
        return time.perf_counter() - start

    print(f"first run, 1 iteration    {flow('warm', 1):8.3f} s")
    one = flow("one", 1)
    cpu = time.process_time()
    many = flow("many", iterations + 1)
    print(f"CPU of the flow process   {(time.process_time() - cpu) / (iterations + 1):8.3f} s an iteration")
    print(f"iteration with Prefect    {(many - one) / iterations:8.3f} s")
    print(f"added by Prefect          {(many - one) / iterations - bare:8.3f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
