"""The values of headers, which may be secret, are in no file of a sweep."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from ebbench.sweep.drive import SPEC, SweepStore


def stored(directory: Path, text: str, *values: str) -> str:
    SweepStore(directory / "sweep").open(text.encode(), values)
    return (directory / "sweep" / SPEC).read_text()


@pytest.mark.parametrize("value", ["hunter2", "1", "sk-abcdefgh/ij+k", 'quo"te', "ü-wort"])
@pytest.mark.parametrize("quote", ["json", "single"])
def test_the_stored_spec_has_names_of_headers_only(tmp_path: Path, value: str, quote: str) -> None:
    import json

    written = json.dumps(value, ensure_ascii=False) if quote == "json" else f"'{value}'"
    text = f'name = "x"\nrepeats = 1\n[common.headers]\nx-secret = {written}\n'
    kept = tomllib.loads(stored(tmp_path, text, value))
    assert kept == {"name": "x", "repeats": 1, "common": {"headers": {"x-secret": "[hidden]"}}}


def test_a_long_value_is_hidden_in_comments_too(tmp_path: Path) -> None:
    assert "sk-abcdefgh" not in stored(tmp_path, '# key sk-abcdefgh\nname = "x"\n', "sk-abcdefgh")


def test_a_spec_whose_secret_cannot_be_found_is_not_stored(tmp_path: Path) -> None:
    kept = stored(tmp_path, 'h = "\\u0068unter2"\n', "hunter2")
    assert kept.startswith("# Not stored")


def test_a_spec_without_headers_is_stored_as_it_is(tmp_path: Path) -> None:
    text = 'name = "x"  # with a comment\n'
    assert stored(tmp_path, text) == text
