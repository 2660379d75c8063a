"""What stays light when imported: the contracts, and the command line until it does something."""

import subprocess
import sys

import pytest

HEAVY = (
    "accelerate",
    "dask",
    "distributed",
    "docker",
    "great_expectations",
    "mlflow",
    "prefect",
    "torch",
    "transformers",
    "vllm",
)
NO_HEAVY = f"import sys; heavy = sorted(set({HEAVY!r}) & set(sys.modules)); assert not heavy, heavy"


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    "module",
    [
        "data_contracts.config",
        "data_contracts.errors",
        "data_contracts.gate",
        "data_contracts.ledger",
        "data_contracts.protocols",
        "data_contracts.records",
        "data_contracts.tables",
        "infra.tracking",
    ],
)
def test_importing_pulls_in_no_framework(module: str) -> None:
    done = run(f"import {module}; {NO_HEAVY}")
    assert done.returncode == 0, done.stderr


def test_every_module_of_data_contracts_is_light() -> None:
    walk = "import data_contracts, importlib, pkgutil;"
    walk += "[importlib.import_module(m.name) for m in pkgutil.walk_packages(data_contracts.__path__, 'data_contracts.')];"
    done = run(f"{walk} {NO_HEAVY}")
    assert done.returncode == 0, done.stderr


def test_help_answers_without_a_framework() -> None:
    code = (
        "import sys; from flows.cli import main; sys.argv = ['bessemer', '--help']\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n"
        f"{NO_HEAVY}"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert "run" in done.stdout


def test_infra_used_before_installation_needs_the_standard_library_only() -> None:
    code = (
        "import sys; before = set(sys.modules); import infra.bootstrap;"
        "new = {m.split('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names);"
        "assert new <= {'infra'}, new"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr
