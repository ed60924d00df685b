"""What the folder of a local model lacks, and the options of vLLM that do without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ebbench.devices.config_file import read_model_file
from ebbench.devices.model_config import positions_of
from ebbench.errors import UsageError

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json", "tekken.json", "*.tiktoken")
RANDOM_WEIGHTS, NO_TOKENIZER = ("--load-format", "dummy"), ("--skip-tokenizer-init",)


def model_folder(model: str) -> Path | None:
    """The folder of a local model; its config.json names it as well. None for a name."""
    path = Path(model)
    if path.name == "config.json" and path.is_file():
        return path.parent
    return path if path.is_dir() else None


def model_config(folder: Path | None) -> Mapping[str, object]:
    """The config.json of a folder; empty where there is none. Raises InputFileError where it is no object."""
    path = folder / "config.json" if folder else None
    if path is None or not path.is_file():
        return {}
    return read_model_file(path)


def position_limit(folder: Path | None) -> int | None:
    """The longest sequence of a local model in tokens; None where it is not known."""
    return positions_of(model_config(folder)) or None


def check_positions(model: str, needed_tokens: int) -> None:
    """Raise UsageError for a local model that cannot hold sequences of so many tokens."""
    limit = position_limit(model_folder(model))
    if limit is not None and limit < needed_tokens:
        raise UsageError(
            f"{model} holds sequences of {limit:,} tokens, and measuring these sizes takes {needed_tokens:,}; choose "
            "smaller --tokens or --contexts"
        )


def random_weight_options(model: str, given: Sequence[str] = ()) -> tuple[str, ...]:
    """Options with which vLLM serves what the folder holds: random weights and no tokenizer where there are none.

    ``given``: the user's options, which are not repeated.
    """
    folder = model_folder(model)
    if folder is None:
        return ()
    weights = () if _any(folder, WEIGHTS) or _has(given, "--load-format") else RANDOM_WEIGHTS
    tokenizer = () if _any(folder, TOKENIZERS) or _has(given, "--skip-tokenizer-init", "--tokenizer") else NO_TOKENIZER
    return (*weights, *tokenizer)


def check_servable(model: str, given: Sequence[str]) -> None:
    """Raise UsageError, with the options that help, for a folder without weights or tokenizer."""
    needed = random_weight_options(model, given)
    if needed:
        lacks = [
            words for part, words in ((RANDOM_WEIGHTS, "weights"), (NO_TOKENIZER, "tokenizer")) if part[0] in needed
        ]
        raise UsageError(
            f"{model_folder(model)} holds no {' and no '.join(lacks)}; to serve random weights, which are as fast, end "
            f"the command with: -- {' '.join((*given, *needed))}"
        )


def _any(folder: Path, patterns: Sequence[str]) -> bool:
    return any(next(folder.glob(pattern), None) is not None for pattern in patterns)


def _has(given: Sequence[str], *names: str) -> bool:
    return any(word.partition("=")[0].replace("_", "-") in names for word in given)
