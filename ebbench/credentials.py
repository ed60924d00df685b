"""API keys from the environment, and texts without them."""

from __future__ import annotations

import os
from collections.abc import Mapping

KEY_VARIABLES = ("EBBENCH_API_KEY", "OPENAI_API_KEY")


def api_key(environ: Mapping[str, str] = os.environ) -> str | None:
    """The API key from the environment. It is not stored or logged, and sent to the server only."""
    return next((environ[name] for name in KEY_VARIABLES if environ.get(name)), None)
