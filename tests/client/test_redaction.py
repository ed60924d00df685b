"""No form of a secret reaches what is shown or stored, wherever a text is cut."""

from __future__ import annotations

import base64

import pytest

from ebbench.network.credentials import redacted
from ebbench.spec.client import ClientOptions, secrets

KEY = "sk-4f/3a+1c2b9d0e8f"


def shown(text: str, key: str | None = KEY, **headers: str) -> str:
    environ = {"EBBENCH_API_KEY": key} if key else {}
    return redacted(text, secrets(ClientOptions(headers={k.replace("_", "-"): v for k, v in headers.items()}), environ))


@pytest.mark.parametrize("form", [KEY, "sk-4f\\/3a+1c2b9d0e8f", "sk-4f%2F3a%2B1c2b9d0e8f", f"Bearer {KEY}"])
def test_every_form_of_a_key_is_hidden(form: str) -> None:
    assert "1c2b9d0e8f" not in shown(f'{{"error": "no such key {form}, sorry"}}')


@pytest.mark.parametrize("length", range(4, len(KEY)))
def test_the_beginning_of_a_key_at_a_cut_is_hidden(length: int) -> None:
    assert shown("x" * 50 + KEY[:length]) == "x" * 50 + "[hidden]"


@pytest.mark.parametrize("value", ["hunter2", "a", "pw", "4711", "correct horse battery staple"])
def test_header_values_of_any_length_are_hidden(value: str) -> None:
    assert shown(f"bad token '{value}' here", key=None, x_token=value) == "bad token '[hidden]' here"


def test_short_values_do_not_spoil_other_words() -> None:
    assert shown("a banana, at 1 a.m., a", key=None, x="an") == "a banana, at 1 a.m., a"


def test_parts_of_a_header_are_hidden_too() -> None:
    word = base64.b64encode(b"user:password").decode()
    assert word not in shown(f"cannot decode {word}", key=None, x_auth=f"Basic {word}")
    assert "4f3a1c2b9d" not in shown("session 4f3a1c2b9d ended", key=None, cookie="session=4f3a1c2b9d; theme=dark")


def test_a_text_without_secrets_stays() -> None:
    assert shown("nothing to hide", key=None) == "nothing to hide"
