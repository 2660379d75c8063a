"""The command: help without heavy imports, errors as one line with exit code 2 (held: 3), show renders an episode."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from data_contracts.records import (
    Check,
    Episode,
    Message,
    ToolCall,
    Turn,
    Verdict,
    VersionSpan,
)
from data_contracts.tables import write_group
from flows import cli
from infra.ledger_log import LedgerLog, this_process
from infra.store import LocalStore
from tests.flows import double
from tests.plugins.prefect import PrefectServer

HEAVY = ("prefect", "dask", "distributed", "mlflow", "torch", "transformers", "vllm", "great_expectations", "docker", "pyarrow")


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and stderr of a command that fails."""
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    return int(ended.value.code or 0), capsys.readouterr().err.strip()


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom flows.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        f"print('heavy:', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "heavy: []" in answer.stdout
    names = "up down status run resume deploy domains show gc doctor sandbox data bench grade regrade"
    for command in names.split():
        assert f"  {command} " in answer.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "-c", "x", "-p", "nonsense"), ("profile", "demo")),
        (("run", "-c", "Not A Name"), ("campaign name", "lower-case")),
        (("run", "-c", "x", "--set", "rollout.group_sise=3"), ("group_sise", "group_size")),
        (("resume", "absent"), ("there is no campaign 'absent'", "none yet")),
        (("show", "absent/iterations/000000/0000-aaaaaaaa/0"), ("there is no such episode",)),
        (("deploy", "-f", "nowhere.yaml"), ("bessemer up",)),
        (("gc",), ("bessemer up",)),
        (("domains", "list", "nonsense"), ("unknown domain 'nonsense'", "echo")),
    ],
)
def test_a_mistake_is_one_readable_line(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    words: tuple[str, ...],
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    code, text = failure(capsys, *arguments)
    assert code == 2
    assert text.startswith("bessemer: ")
    assert len(text.splitlines()) == 1
    assert all(word in text for word in words), text


def test_debug_shows_the_traceback(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from data_contracts.errors import ConfigError

    monkeypatch.setenv("BESSEMER_DEBUG", "1")
    with pytest.raises(ConfigError):
        cli.main(["resume", "absent"])


def test_run_advances_and_a_held_campaign_exits_with_three(
    stand_ins: Path, prefect: PrefectServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from flows import run, stack

    monkeypatch.setattr(stack, "ensure", lambda profile, on_change: stack.addresses(profile))
    arguments = ["-c", "terminal", "-p", str(double.PROFILE), "--set", f"stack.prefect_api={prefect.api_url}"]
    assert run.load_profile(str(double.PROFILE)).campaign.iterations == 2
    with pytest.raises(SystemExit, match="0"):
        cli.main(["run", *arguments])
    out = capsys.readouterr().out
    assert "held-out reward of version 2: echo 0.200" in out
    assert "prefect_run: http://127.0.0.1:" in out
    log = LedgerLog(LocalStore(stand_ins / "store"), "terminal")
    with log.lease(this_process("night-shift")):
        code, text = failure(capsys, "resume", "terminal", "-n", "1")
    assert code == 3
    assert "night-shift" in text


def test_show_renders_turns_calls_errors_tests_and_reward(home: Path) -> None:
    store = LocalStore(home / "store")
    group_id = "c/iterations/000000/0000-1a2b3c4d"
    call = ToolCall(call_id="1", name="add", arguments='{"a": "x"}')
    answer = Message(role="tool", content='{"status": "error", "message": "a must be a number"}', tool_call_id="1", name="add")
    turns = (
        Turn(
            index=0,
            message=Message(role="assistant", content="", tool_calls=(call,)),
            token_start=2,
            token_stop=4,
            finish_reason="stop",
            observations=(answer,),
        ),
    )
    episode = Episode(
        id=f"{group_id}/0",
        group_id=group_id,
        problem_id="calculator/train/7",
        domain="calculator",
        split="train",
        campaign="c",
        iteration=0,
        member=0,
        prompt=(Message(role="user", content="What is 2 + [3]?"),),
        tools=(),
        token_ids_T=(1, 2, 3, 4),
        loss_mask_T=(0, 0, 1, 1),
        logprobs_T=(0.0, 0.0, -0.5, -0.5),
        prompt_length=2,
        spans=(VersionSpan(start=2, stop=4, version=0),),
        turns=turns,
        stop_reason="turn_budget",
        outcome="policy_failure",
        verdict=Verdict(
            verifier="exact_answer",
            trust="cases",
            score=0.0,
            passed=False,
            checks=(Check(id="total", passed=False, message="no answer"),),
        ),
    )
    from data_contracts.config import RewardConfig
    from flows import show

    store.put_if_absent("campaigns/c/iterations/000000/groups/0000-1a2b3c4d.parquet", write_group([episode]))
    found, group = show.find_episode(store, episode.id)
    assert found == episode
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(show.render(found, show.score_of(found, group, RewardConfig())))
    text = console.export_text()
    expected = (
        "What is 2 + [3]?",
        'add({"a": "x"})',
        "tool add: error",
        "a must be a number",
        "no answer",
        "turn_budget",
        "0.000",
    )
    assert all(part in text for part in expected), text
