"""Model folders without weights, tokenizer or positions: options that help, and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ebbench.engines.vllm import VllmEngine
from ebbench.engines.vllm_command import (
    Emulation,
    check_positions,
    check_servable,
    position_limit,
    random_weight_options,
)
from ebbench.errors import UsageError
from ebbench.spec.server import EngineOptions
from vllm_eb.policy import parse_policy

DUMMY, SKIP = ("--load-format", "dummy"), ("--skip-tokenizer-init",)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 2048}), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("files", "given", "needed"),
    [
        ((), (), DUMMY + SKIP),
        (("model.safetensors",), (), SKIP),
        (("pytorch_model.bin", "tokenizer.json"), (), ()),
        (("tokenizer.model",), (), DUMMY),
        ((), DUMMY, SKIP),
        ((), ("--load-format=runai_streamer", "--skip_tokenizer_init"), ()),
        ((), ("--tokenizer", "other"), DUMMY),
    ],
)
def test_options_are_those_that_the_folder_needs(
    folder: Path, files: tuple[str, ...], given: tuple[str, ...], needed: tuple[str, ...]
) -> None:
    for name in files:
        (folder / name).touch()
    assert random_weight_options(str(folder), given) == needed
    assert random_weight_options(str(folder / "config.json"), given) == needed


def test_a_name_is_fetched_and_needs_nothing() -> None:
    assert random_weight_options("Qwen/Qwen3-8B") == ()


def test_a_folder_without_weights_is_refused_with_the_options_that_help(folder: Path) -> None:
    engine = VllmEngine(model=str(folder / "config.json"), vllm_options=("--dtype", "float32"))
    with pytest.raises(UsageError, match=r"no weights and no tokenizer.*-- --dtype float32 --load-format dummy"):
        engine.serving(parse_policy("v1"), None, EngineOptions(), None, "unknown")
    served = VllmEngine(model=str(folder), vllm_options=(*DUMMY, *SKIP)).serving(
        parse_policy("v1"), None, EngineOptions(), None, "unknown"
    )
    assert served.max_model_len == 2048


def test_an_emulated_device_needs_no_weights(folder: Path) -> None:
    engine = VllmEngine(model=str(folder), emulation=Emulation("h200", "qwen3-8b"))
    assert engine.serving(parse_policy("v1"), None, EngineOptions(), None, "unknown").model == str(folder)


def test_positions_are_checked_before_anything_starts(folder: Path) -> None:
    assert position_limit(folder) == 2048
    check_positions(str(folder), 2048)
    with pytest.raises(UsageError, match=r"2,048 tokens.*2,049"):
        check_positions(str(folder / "config.json"), 2049)
    check_positions("Qwen/Qwen3-8B", 10**9)  # not known before the start: vLLM checks it


def test_a_model_folder_is_refused_with_only_the_files_it_lacks(folder: Path) -> None:
    (folder / "tokenizer.json").touch()
    with pytest.raises(UsageError, match=r"holds no weights; .*-- --load-format dummy$"):
        check_servable(str(folder), ())


def test_a_folder_with_scaled_rotary_embeddings_has_the_stretched_length(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    config = {"max_position_embeddings": 512, "rope_scaling": scaling}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert position_limit(tmp_path) == 2048
    check_positions(str(tmp_path), 2048)
    with pytest.raises(UsageError, match="2,048 tokens"):
        check_positions(str(tmp_path), 2049)
