"""Texts from servers, data sets and stored files, made harmless where they are shown.

Such a text may hold control sequences of terminals, commands of CI logs, Markdown, or formulas of spreadsheets.
"""

from __future__ import annotations

import re
from typing import TypeVar

# Controls, what changes the direction of text or has no width, the line ends of Unicode, and lone surrogates.
_HIDDEN = r"\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff"
_ONE_LINE = re.compile(f"[{_HIDDEN}]")
_LINES = re.compile(f"(?!\n)[{_HIDDEN}]")
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_CI_COMMAND = re.compile(  # of GitHub; of Azure and TeamCity
    r"::(?=(?:error|warning|notice|debug|group|endgroup|echo|set-|save-|add-|remove-|stop-)[\w-]*)|##(?=\w*\[)",
    re.IGNORECASE,
)
_MARKDOWN = re.compile(r"[\\`*\[\]|~#]|(?<![^\W_])_|_(?![^\W_])|(?<=:)//|(?<=www)\.", re.IGNORECASE)
_BLOCK = re.compile(r"^(\s*)([-+](?=\s|$)|-(?=[-\s]*$)|=(?==*\s*$)|\d+(?=[.)](?:\s|$)))")  # lists, rules, headings
_NUMBER = re.compile(r"[-+]?([\d.,]+([eE][-+]?\d+)?)?")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")

T = TypeVar("T")


def visible(text: str, *, lines: bool = False) -> str:
    """The text with control characters as escapes, and without what a CI log takes for a command.

    ``lines``: line ends stay, for texts of several lines that are ours.
    """
    text = (_LINES if lines else _ONE_LINE).sub(lambda matched: _escaped(matched.group()), text)
    return _CI_COMMAND.sub(lambda matched: f"{matched.group()[0]}\\{matched.group()[1]}", text)


def markdown(text: str) -> str:
    """The text on one line, as text: no element, link, image, mention or block of GitHub's Markdown."""
    text = visible(" ".join(text.splitlines())).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = _BLOCK.sub(_escaped_block, _MARKDOWN.sub(lambda matched: f"\\{matched.group()}", text))
    return text.replace("@", "@<!-- -->")  # an escaped @ would still mention


def csv_cell(value: T) -> T | str:
    """A value for a CSV file: a text that a spreadsheet would compute is preceded by an apostrophe."""
    if not isinstance(value, str):
        return value
    formula = value.startswith(_FORMULA) and _NUMBER.fullmatch(value) is None
    return _LINES.sub(lambda matched: _escaped(matched.group()), f"'{value}" if formula else value)


def _escaped(character: str) -> str:
    number = ord(character)
    return _SHORT.get(character) or (f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}")


def _escaped_block(matched: re.Match[str]) -> str:
    start, sign = matched.groups()
    return f"{start}{sign}\\" if sign.isdigit() else f"{start}\\{sign}"
