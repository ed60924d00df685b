"""Speculative decoding of a server, as ``--speculative method=mtp,tokens=3,acceptance=0.8,0.6,0.4`` describes it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from ebbench.errors import UnknownNameError, UsageError
from vllm_eb.theory import Drafts

MOST_TOKENS = 32
OPTION = "--speculative"
EXAMPLE = "method=eagle3,tokens=3,acceptance=0.8,0.6,0.4"


@dataclass(frozen=True)
class Method:
    """How drafts are made. ``own_kv``: by layers with a KV cache of their own, which read the target's hidden states:
    vLLM then reserves KV slots ahead of the drafts and computes the last block of a cached prefix again. ``layers``:
    of the drafter; ``head_share``: of the target's vocabulary that it predicts. ``asynchronous``: vLLM can schedule the
    next step before the drafts are known, and otherwise turns asynchronous scheduling off."""

    own_kv: bool
    layers: int
    head_share: float = 1.0
    asynchronous: bool = True


METHODS = {
    "mtp": Method(own_kv=True, layers=1),
    "eagle": Method(own_kv=True, layers=1),
    "eagle3": Method(own_kv=True, layers=1, head_share=0.25),
    "ngram": Method(own_kv=False, layers=0, asynchronous=False),
}
_ELSEWHERE = ("draft_model", "medusa", "mlp_speculator", "suffix", "dflash", "dspark", "ngram_gpu")


@dataclass(frozen=True)
class Speculative:
    """``tokens`` drafted per decode step, of which ``acceptance[j]`` of the drafts have j + 1 accepted at least.

    This is the rate per position that vLLM reports, so it cannot rise.
    """

    method: str
    tokens: int
    acceptance: tuple[float, ...]

    @property
    def text(self) -> str:
        """The setting with all its values."""
        rates = ",".join(f"{rate:.12g}" for rate in self.acceptance)
        return f"method={self.method},tokens={self.tokens},acceptance={rates}"

    @property
    def rules(self) -> Method:
        """What vLLM does for this method."""
        return METHODS[self.method]

    @property
    def lookahead_tokens(self) -> int:
        """KV slots that vLLM reserves for a sequence beyond the tokens that it schedules."""
        return self.tokens if self.rules.own_kv else 0

    @property
    def theory(self) -> Drafts:
        """As the formulas and the policies take it; the cost of drafting is left to the calibration."""
        return Drafts(self.acceptance, lookahead_tokens=self.lookahead_tokens)

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens of a decode step per sequence, where no answer ends."""
        return 1.0 + sum(self.acceptance)


@cache
def speculative_of(text: str) -> Speculative:
    """Read the setting. Raises UsageError."""
    given = _pairs(text)
    method = given.pop("method", None)
    if method is None:
        raise UsageError(f"{OPTION} {text}: name the method, one of {', '.join(METHODS)}; for example {EXAMPLE}")
    if method in _ELSEWHERE:
        raise UsageError(f"{OPTION}: method {method} is vLLM's, but not simulated; use {', '.join(METHODS)}")
    if method not in METHODS:
        raise UnknownNameError("method of speculative decoding", method, tuple(METHODS))
    tokens = _tokens(given.pop("tokens", None))
    rates = _acceptance(given.pop("acceptance", None))
    if given:
        raise UnknownNameError(f"setting of {OPTION}", next(iter(given)), ("method", "tokens", "acceptance"))
    tokens = len(rates) if tokens is None else tokens
    if len(rates) > tokens:
        raise UsageError(
            f"{OPTION}: acceptance has {len(rates)} rates for {tokens} drafted tokens; give at most one per token"
        )
    return Speculative(method, tokens, _continued(rates, tokens))


def _pairs(text: str) -> dict[str, str]:
    """``a=1,b=2,3`` by name: a part without a name belongs to the one before it."""
    found: dict[str, str] = {}
    name = ""
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if equals:
            name = key.strip()
            if name in found:
                raise UsageError(f"{OPTION}: {name} is given twice")
            found[name] = value.strip()
        elif name:
            found[name] += f",{part.strip()}"
        else:
            raise UsageError(f"{OPTION} {text!r}: expected name=value, for example {EXAMPLE}")
    return found


def _tokens(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:9]) <= MOST_TOKENS:
        raise UsageError(f"{OPTION}: tokens must be a whole number from 1 to {MOST_TOKENS}, not {text}")
    return int(text)


def _acceptance(text: str | None) -> tuple[float, ...]:
    """The rates that are given, or those of a file."""
    if not text:
        raise UsageError(f"{OPTION}: give the acceptance rate per position, for example {EXAMPLE}")
    if text.endswith(".json"):
        return _measured(Path(text))
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"{OPTION}: acceptance must be rates in [0, 1] or a .json file with measured ones, not {text}"
        ) from None
    return _checked(rates)


def _checked(rates: tuple[float, ...]) -> tuple[float, ...]:
    for position, rate in enumerate(rates, 1):
        if not 0.0 <= rate <= 1.0:
            raise UsageError(f"{OPTION}: acceptance at position {position} must lie in [0, 1], not {rate:g}")
    for position, (before, rate) in enumerate(pairwise(rates), 2):
        if rate > before:
            raise UsageError(
                f"{OPTION}: acceptance rises at position {position} from {before:g} to {rate:g}; it is the share of "
                "drafts accepted at least that far, as vLLM reports it, which cannot rise"
            )
    return rates


def _measured(path: Path) -> tuple[float, ...]:
    """``acceptance`` of a JSON file, as `ebbench show RUN --json` gives it."""
    from ebbench.foreign.documents import read_json

    read = read_json(path)
    try:
        rates = tuple(float(rate) for rate in read["acceptance"])
    except (ValueError, TypeError, KeyError):
        raise UsageError(f'{OPTION}: {path} must be a JSON object with "acceptance": [0.8, 0.6, ...]') from None
    if not rates:
        raise UsageError(f"{OPTION}: {path} has no acceptance rates")
    return _checked(rates)


def _continued(rates: tuple[float, ...], tokens: int) -> tuple[float, ...]:
    """The rates of all positions: further drafted tokens are accepted as often, given those before, as the last one."""
    before = rates[-2] if len(rates) > 1 else 1.0
    share = rates[-1] / before if before else 0.0
    found = list(rates)
    while len(found) < tokens:
        found.append(found[-1] * share)
    return tuple(found)
