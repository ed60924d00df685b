"""API keys from the environment, and texts without them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from urllib.parse import quote

from ebbench.errors import UsageError

KEY_VARIABLES = ("EBBENCH_API_KEY", "OPENAI_API_KEY")
HIDDEN = "[hidden]"
LONG = 8  # characters; a shorter text is hidden as a whole word only, as it may be part of any word
_LEAST_PART = 4  # characters of a secret at the end of a text that was cut


def api_key(environ: Mapping[str, str] = os.environ) -> str | None:
    """The API key from the environment. It is not stored or logged, and sent to the server only.

    White space around it, as of a file that it was read from, is no part of it. Raises UsageError for a key that no
    header can hold.
    """
    name = next((name for name in KEY_VARIABLES if environ.get(name, "").strip()), None)
    if name is None:
        return None
    key = environ[name].strip()
    if not (key.isascii() and key.isprintable()):
        raise UsageError(f"{name} holds a line break or a character beyond ASCII, which no API key has")
    return key


def written_forms(values: Iterable[str]) -> tuple[str, ...]:
    """The forms in which a server may repeat secret values, longest first.

    Parts of a value count too where they are long enough for a secret: ``Basic dXNlcjpwYXNz``, ``session=4f3a1c2b9d``.
    """
    parts = {part for value in values for part in re.split(r"[\s;,=]+", value) if len(part) >= LONG}
    texts = parts | {value.strip() for value in values if value.strip()}
    forms = {
        form
        for text in texts
        for form in (text, json.dumps(text)[1:-1], text.replace("/", "\\/"), quote(text, safe=""))
    }
    return tuple(sorted(forms, key=lambda form: (-len(form), form)))


def redacted(text: str, hidden: tuple[str, ...]) -> str:
    """``text`` without the texts of ``hidden``, which come from :func:`written_forms`; cut it afterwards, not before.

    The beginning of one at the very end is hidden as well: the text may have been cut where it was received.
    """
    for secret in hidden:
        whole = re.escape(secret)
        text = re.sub(whole if len(secret) >= LONG else rf"(?<!\w){whole}(?!\w)", HIDDEN, text)
    for secret in hidden:
        for length in range(min(len(secret), len(text) + 1) - 1, _LEAST_PART - 1, -1):
            if text.endswith(secret[:length]):
                return text[:-length] + HIDDEN
    return text
