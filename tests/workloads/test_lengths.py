import csv
import itertools
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbench.errors import UsageError
from ebbench.installation import bundled_dir
from ebbench.traffic.arrivals import substream
from ebbench.traffic.lengths import LengthSpec, censored_moments, fit_censored, length_spec
from ebbench.workloads import build_plan
from ebbench.workloads.spec import Turns, continuation, draw_rounds, load_workload

MANY = 400_000


def table9() -> dict[str, dict[str, str]]:
    with (bundled_dir("reference") / "paper_tables" / "table9_workload_lengths.csv").open() as file:
        rows = [line for line in file if not line.startswith("#")]
    return {row["workload"].lower(): row for row in csv.DictReader(rows)}


@pytest.mark.parametrize("name", ["sharegpt", "longbench", "numinamath"])
def test_profiles_reproduce_the_published_statistics(name: str) -> None:
    published, profile = table9()[name], load_workload(name).profile
    outputs = profile.output.draw(substream(1, "t"), MANY)
    inputs = profile.input.draw(substream(2, "t"), MANY)
    # Whole tokens and at least one of them move the mean by up to 0.1 tokens.
    assert outputs.mean() == pytest.approx(float(published["output_mean"]), rel=0.01)
    assert outputs.std() == pytest.approx(float(published["output_std"]), rel=0.02)
    assert inputs.mean() == pytest.approx(float(published["input_mean"]), rel=0.02)


def test_wildchat_profile_has_the_published_turns_and_answers() -> None:
    profile = load_workload("wildchat").profile
    assert profile.turns is not None
    rounds = draw_rounds(profile.turns, substream(1, "t"), MANY)
    assert rounds.min() == 6
    assert rounds.max() == 12
    assert rounds.mean() == pytest.approx(9.3, abs=0.02)
    published = table9()["wildchat"]
    assert profile.output.mean == float(published["output_mean"])
    assert profile.output.std == float(published["output_std"])
    assert profile.output.draw(substream(1, "t"), 1000).max() == 256


def test_caps_and_ranges_of_the_selection_rules() -> None:
    sharegpt = build_plan("sharegpt", source="profile")
    assert sharegpt.table["output_tokens"].to_numpy().max() == 500
    longbench = build_plan("longbench", source="profile").table
    assert longbench["input_tokens"].to_numpy().min() >= 1000
    assert longbench["input_tokens"].to_numpy().max() <= 4000
    assert longbench["output_tokens"].to_numpy().max() <= 20
    numina = build_plan("numinamath", source="profile").table["output_tokens"].to_numpy()
    assert numina.min() >= 800
    assert numina.max() <= 4000


def test_output_profiles_have_increasing_hazard() -> None:
    """The paper measures it for all four (table 9); a gamma's hazard rises when its shape is above one."""
    for name in ("sharegpt", "longbench", "wildchat"):
        outputs = load_workload(name).profile.output.draw(substream(1, "t"), MANY)
        edges = np.unique(np.quantile(outputs, [0.02, 0.15, 0.3, 0.45]))
        rates = []
        for low, high in itertools.pairwise(edges):
            alive = (outputs >= low).sum()
            rates.append(((outputs >= low) & (outputs < high)).sum() / alive / (high - low))
        assert rates == sorted(rates), name


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["gamma", "lognormal"]), st.floats(20, 2000), st.floats(0.3, 1.5), st.floats(1.2, 4))
def test_fit_goes_back_and_forth(
    family: Literal["gamma", "lognormal"], mean: float, variation: float, cap_ratio: float
) -> None:
    cap = mean * cap_ratio
    censored = censored_moments(family, mean, mean * variation, cap)
    fitted = fit_censored(family, *censored, cap)
    assert censored_moments(family, *fitted, cap) == pytest.approx(censored, rel=1e-4)


def test_fit_refuses_the_impossible() -> None:
    with pytest.raises(UsageError, match="no gamma cut at 100"):
        fit_censored("gamma", 50.0, 80.0, 100.0)


@given(st.floats(1.0, 500.0), st.sampled_from(["uniform", "geometric", "gamma:0.5", "gamma:4", "fixed"]))
@settings(max_examples=60, deadline=None)
def test_lengths_are_whole_and_at_least_one(mean: float, distribution: str) -> None:
    lengths = length_spec(mean, distribution).draw(substream(0, "t"), 200)
    assert lengths.dtype == np.int32
    assert lengths.min() >= 1


@pytest.mark.parametrize(
    ("distribution", "variation"),
    [("uniform", 0.5 / 3**0.5), ("geometric", 1.0), ("gamma:4", 0.5), ("gamma:1", 1.0), ("fixed", 0.0)],
)
def test_distributions_have_their_mean_and_spread(distribution: str, variation: float) -> None:
    lengths = length_spec(512, distribution).draw(substream(0, "t"), MANY)
    assert lengths.mean() == pytest.approx(512, rel=0.01)
    assert lengths.std() / lengths.mean() == pytest.approx(variation, abs=0.01)


def test_uniform_is_within_half_of_the_mean() -> None:
    lengths = length_spec(128, None).draw(substream(0, "t"), MANY)
    assert (lengths.min(), lengths.max()) == (64, 192)


@pytest.mark.parametrize("text", ["gauss", "gamma", "gamma:x", "gamma:-1", "gamma:inf", "uniform:3", "fixed:2"])
def test_unknown_distributions_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="length distribution"):
        length_spec(10, text)


@pytest.mark.parametrize(
    "settings_",
    [
        {"family": "gamma", "mean": 10},
        {"family": "gamma", "mean": 10, "std": 1, "shape": 2},
        {"family": "lognormal", "mean": 10},
        {"family": "uniform", "mean": 0},
        {"family": "uniform", "mean": 10, "spread": 1.5},
        {"family": "uniform", "mean": 10, "offset": 10},
        {"family": "fixed", "mean": 10, "max": 0},
        {"family": "fixed", "mean": float("nan")},
        {"family": "fixed", "mean": float("inf")},
        {"family": "gamma", "mean": 10, "std": float("inf")},
        {"family": "gamma", "mean": 10, "shape": float("inf")},
        {"family": "lognormal", "mean": 10, "std": float("inf")},
        {"family": "gamma", "mean": 10, "std": 5, "statistics": "censored"},
    ],
)
def test_impossible_specs_are_refused(settings_: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must|needs"):
        LengthSpec(**settings_)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("uniform", "std", 1200),
        ("uniform", "shape", 2),
        ("geometric", "std", 3),
        ("geometric", "spread", 0.2),
        ("gamma", "spread", 0.2),
        ("lognormal", "shape", 2),
        ("fixed", "std", 3),
        ("fixed", "offset", 3),
        ("uniform", "statistics", "censored"),
    ],
)
def test_a_key_the_family_does_not_use_is_refused(family: Any, key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{key} has no effect in family '{family}', which uses mean, .*leave it out"):
        LengthSpec(family=family, mean=900, max=8192, **{key: value})


@given(st.integers(1, 20), st.integers(0, 20), st.floats(0, 1))
def test_continuation_gives_the_asked_mean(low: int, more: int, share: float) -> None:
    turns = Turns(min=low, max=low + more, mean=low + share * more)
    q = continuation(turns)
    assert low + sum(q**i for i in range(1, more + 1)) == pytest.approx(turns.mean, abs=1e-6)
    rounds = draw_rounds(turns, substream(0, "t"), 50)
    assert rounds.min() >= low
    assert rounds.max() <= low + more
