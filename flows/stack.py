"""The stack of a profile: infra's services plus engine and trainer, whose command lines models/ gives.

Addresses of existing services in the profile are used as they are. Three words stand for shipped stand-ins, for dry runs and
tests without any model: engine address "scripted:POLICY" (oracle, noop, random), trainer address "fake", Dask address "local"
(this process), MLflow URI "off".
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from data_contracts.config import Profile
from data_contracts.errors import ConfigError
from data_contracts.records import Record
from infra import prefect_server, stack
from infra.paths import cache, home
from infra.processes import ProcessSpec
from infra.supervisor import ProcessState, StackState, replace

SCRIPTED, FAKE, LOCAL, OFF = "scripted:", "fake", "local", "off"
RECORD = "stack.profile.json"


class Addresses(Record, frozen=True, kw_only=True):
    """Where everything is. `engines` may be empty only for a scripted engine; `mlflow` is None when tracking is off."""

    prefect_api: str
    mlflow: str | None
    dask: str
    engines: tuple[str, ...]
    trainer: str


def specs(profile: Profile, *, state_folder: Path | None = None) -> list[ProcessSpec]:
    """Every process the profile needs on this machine. Resolves the base model (and may fetch it) when one has to serve."""
    folder = state_folder or home()
    ports = stack.Ports(folder)
    config = profile.stack
    worker_env = {"BESSEMER_HOME": str(folder), "BESSEMER_CACHE": str(cache())}
    found = [
        spec
        for spec in stack.service_specs(folder, config, ports, worker_env=worker_env)
        if not (spec.name == "dask" and config.dask.address == LOCAL)
        and not (spec.name == "mlflow" and config.mlflow_uri == OFF)
    ]
    return [*found, *_engine(profile, ports), *_trainer(profile, ports)]


def _engine(profile: Profile, ports: stack.Ports) -> list[ProcessSpec]:
    if profile.stack.engine.addresses:
        return []
    from models.base_model import resolve
    from models.serving.vllm_command import vllm_command

    port = ports.of("vllm-0")
    model = resolve(profile.campaign.base_model)
    argv, env = vllm_command(profile.stack.engine, model, port=port, seed=profile.campaign.seed)
    url = f"http://127.0.0.1:{port}"
    return [
        ProcessSpec(
            name="vllm-0",
            argv=tuple(argv),
            env=env,
            address=url,
            health=f"{url}/health",
            startup_seconds=profile.stack.engine.startup_seconds,
        )
    ]


def _trainer(profile: Profile, ports: stack.Ports) -> list[ProcessSpec]:
    if profile.stack.trainer_address is not None:
        return []
    from flows.overview import store_url
    from models.training.command import HEALTH_PATH, trainer_command

    port = ports.of("trainer")
    argv, env = trainer_command(store=store_url(profile.stack.store), port=port, processes=profile.stack.trainer_processes)
    url = f"http://127.0.0.1:{port}"
    return [ProcessSpec(name="trainer", argv=tuple(argv), env=env, address=url, health=f"{url}{HEALTH_PATH}")]


def start(profile: Profile, *, on_change: Callable[[ProcessState], None] | None = None) -> StackState:
    """Bring the profile's stack up (or reconcile a running one with it) and return when it is healthy."""
    folder = home()
    folder.mkdir(parents=True, exist_ok=True)
    wanted = specs(profile)
    replace(folder / RECORD, profile.model_dump_json(indent=1).encode())
    seconds = 300.0 + profile.stack.engine.startup_seconds
    return stack.up(folder, wanted, on_change=on_change, seconds=seconds)


def ensure(profile: Profile, *, on_change: Callable[[ProcessState], None] | None = None) -> Addresses:
    """The addresses for `profile`, with the local stack started when none is running.

    A running stack that serves another base model is not touched: ConfigError says what to do.
    """
    state = stack.running(home())
    recorded = last_profile()
    if state is None:
        start(profile, on_change=on_change)
    elif (
        recorded is not None
        and recorded != profile
        and {s.name: s for s in stack.specs_of(home())} != {s.name: s for s in specs(profile)}
    ):
        raise ConfigError(
            f"the running stack was started for other settings (base model {recorded.campaign.base_model})",
            field="profile",
            remedy="Run `bessemer up --profile ...` for this profile first (it restarts only what differs), or `bessemer down`",
        )
    return addresses(profile)


def addresses(profile: Profile) -> Addresses:
    """From the profile where it names them, else from the running stack. Raises StackDown when there is neither."""
    state = stack.running(home())
    config = profile.stack

    def local(name: str) -> str:
        address = state.address(name) if state is not None else None
        if address is None:
            raise stack.StackDown(f"no '{name}' is running in {home()} and the profile names no address; run `bessemer up`")
        return address

    return Addresses(
        prefect_api=config.prefect_api or f"{local('prefect')}/api",
        mlflow=None if config.mlflow_uri == OFF else config.mlflow_uri or local("mlflow"),
        dask=config.dask.address or local("dask"),
        engines=tuple(config.engine.addresses) or (local("vllm-0"),),
        trainer=config.trainer_address or local("trainer"),
    )


def last_profile() -> Profile | None:
    """The profile that the stack of this state folder was last started for."""
    try:
        return Profile.model_validate_json((home() / RECORD).read_bytes())
    except FileNotFoundError:
        return None


def use_running_prefect() -> int:
    """Point this process at the running stack's Prefect; returns its flow heartbeat in seconds. Raises StackDown."""
    state, recorded = stack.running(home()), last_profile()
    url = recorded.stack.prefect_api if recorded is not None else None
    if url is None:
        local = state.address("prefect") if state is not None else None
        url = f"{local}/api" if local else os.environ.get("PREFECT_API_URL")
    if url is None:
        raise stack.StackDown(f"no Prefect server is running in {home()}; run `bessemer up` first")
    beat = recorded.stack.heartbeat_seconds if recorded is not None else 30.0
    prefect_server.use(home(), api_url=url, heartbeat_seconds=beat)
    return prefect_server.heartbeat(beat)
