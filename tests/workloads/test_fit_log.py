"""Workloads fitted to logs: the same traffic in distribution, and no record of the log."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from ebbench.cli.main import app
from ebbench.errors import UsageError
from ebbench.records.plan import block_tokens
from ebbench.traffic.arrivals import dispersion, stretch_centres, values_at
from ebbench.workloads import build_plan
from ebbench.workloads.fitted import GROUP, fit_points, tailed_at
from ebbench.workloads.log_report import repeated_prefixes
from ebbench.workloads.requests import int_lists, single_turn
from ebbench.workloads.shared_prefix import count_repeats, repeats_in, shared_prefixes
from ebbench.workloads.trace import read_trace


def fit(log: Path, tmp_path: Path, *options: str) -> Path:
    path = tmp_path / "fitted.toml"
    path.unlink(missing_ok=True)
    done = CliRunner().invoke(app, ["workloads", "fit", f"log:{log}", "-o", str(path), *options])
    assert done.exit_code == 0, done.output
    return path


@pytest.fixture
def azure(tmp_path: Path) -> Path:
    """Requests at a rate that doubles half-way, whose outputs are long where their prompts are short."""
    rng = np.random.default_rng(2)
    times = np.concatenate([np.cumsum(rng.exponential(0.5, 1000)), 500 + np.cumsum(rng.exponential(0.25, 2000))])
    inputs = rng.lognormal(6, 1, 3000).astype(int) + 1
    outputs = np.maximum(1, 40_000 // (inputs + 50) + rng.integers(0, 20, 3000))
    path = tmp_path / "azure.csv"
    rows = zip(times + 1.7e9, inputs, outputs, strict=True)
    path.write_text("timestamp,input_tokens,output_tokens\n" + "".join(f"{t:.6f},{i},{o}\n" for t, i, o in rows))
    return path


def test_lengths_rates_and_their_dependence(azure: Path, tmp_path: Path) -> None:
    log = build_plan(f"log:{azure}").table
    plan = build_plan(str(fit(azure, tmp_path)))
    assert plan.facts["source"] == "fitted"
    assert plan.facts["scenario"] == "fitted"
    assert len(plan) == 3000
    for column in ("input_tokens", "output_tokens"):
        real, drawn = log[column].to_numpy(), plan.table[column].to_numpy()
        assert drawn.mean() == pytest.approx(real.mean(), rel=0.02)
        assert np.percentile(drawn, [5, 50, 95]) == pytest.approx(np.percentile(real, [5, 50, 95]), rel=0.06)
    correlation = [
        np.corrcoef(np.log(table["input_tokens"].to_numpy()), np.log(table["output_tokens"].to_numpy()))[0, 1]
        for table in (log, plan.table)
    ]
    assert correlation[1] == pytest.approx(correlation[0], abs=0.05)
    halves = [np.searchsorted(table["arrival_ns"].to_numpy(), 5e11) for table in (log, plan.table)]
    assert halves[1] == pytest.approx(halves[0], rel=0.05)
    assert plan.table["arrival_ns"].to_numpy()[-1] / 1e9 == pytest.approx(1000, rel=0.03)


def test_a_fitted_workload_runs_longer_and_at_other_rates(azure: Path, tmp_path: Path) -> None:
    path = str(fit(azure, tmp_path))
    once, longer = build_plan(path), build_plan(path, num_prompts=6000)
    faster = build_plan(path, rate_scale=2.0)
    spans = [plan.table["arrival_ns"].to_numpy()[-1] / 1e9 for plan in (once, longer, faster)]
    assert spans[1] == pytest.approx(2 * spans[0], rel=0.03)
    # The rate curve belongs to the time of day: at twice the rate the first half-hour holds twice the requests.
    assert np.searchsorted(faster.table["arrival_ns"].to_numpy(), 4e11) == pytest.approx(
        2 * np.searchsorted(once.table["arrival_ns"].to_numpy(), 4e11), rel=0.06
    )
    assert build_plan(path, "poisson", request_rate=3.0).facts["scenario"] == "poisson"
    with pytest.raises(UsageError, match="--speed"):
        build_plan(f"log:{azure}", rate_scale=2.0)
    with pytest.raises(UsageError, match="scales the rates of a scenario"):
        build_plan("balanced", rate_scale=2.0)


def test_its_own_arrivals_take_another_rate(azure: Path, tmp_path: Path) -> None:
    """`--scenario trace` is its own arrivals: the same gaps, lengths and drift as with a factor of its rate."""
    path = str(fit(azure, tmp_path))
    rate = tomllib.loads(Path(path).read_text())["fitted"]["arrivals"]["rate"]
    scaled, own = build_plan(path, "trace", request_rate=2 * rate), build_plan(path, rate_scale=2.0)
    assert scaled.facts["scenario"] == "fitted"
    assert scaled.table.equals(own.table)
    with pytest.raises(UsageError, match=r"it needs a workload log:FILE$"):
        build_plan(path, "trace-slice")


def test_no_record_of_the_log_is_in_the_file(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    path = tmp_path / "log.csv"
    inputs, outputs = rng.permutation(100_000)[:400] + 7, rng.permutation(100_000)[:400] + 7
    times = np.sort(rng.uniform(0, 4000, 400)) + 1.7e9
    rows = zip(times, inputs, outputs, strict=True)
    path.write_text("timestamp,input_tokens,output_tokens\n" + "".join(f"{t:.3f},{i},{o}\n" for t, i, o in rows))
    found = tomllib.loads(fit(path, tmp_path).read_text())
    numbers = {round(number, 6) for number in _numbers(found["fitted"]["lengths"])}
    assert len(numbers) > 20
    assert len(numbers & set(map(float, [*inputs, *outputs]))) <= 1
    values = sum(len(_numbers(entry["input"])) for entry in found["fitted"]["lengths"])
    assert values <= 400 / GROUP
    assert 2 <= len(found["fitted"]["outputs"]) <= 400 / GROUP
    assert len(set(found["fitted"]["outputs"]) & set(map(float, outputs))) <= 1
    for name in ("prompts", "outputs", "output_roots"):
        assert 2 <= len(found["fitted"]["drift"][name]) <= 400 / GROUP


def _numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for inner in value.values() for number in _numbers(inner)]
    if isinstance(value, list):
        return [number for inner in value for number in _numbers(inner)]
    return [float(value)] if isinstance(value, int | float) else []


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300), st.booleans())
def test_points_keep_the_mean(values: list[float], tailed: bool) -> None:
    means, shares = fit_points(values, 9, tailed=tailed), (np.arange(2**18) + 0.5) / 2**18
    drawn = tailed_at(means, shares) if tailed else values_at(means, shares)
    assert drawn.mean() == pytest.approx(np.mean(values), rel=1e-4, abs=1e-6)
    assert (np.diff(drawn) >= -1e-9 * drawn.max()).all()


def test_the_tail_is_above_the_mean_of_the_highest_group() -> None:
    """Exponential values have the spread of all of them, not that of their groups' means."""
    values = np.random.default_rng(0).exponential(100, 4000)
    means, shares = fit_points(values, 9, 400, tailed=True), (np.arange(2**16) + 0.5) / 2**16
    assert tailed_at(means, shares).mean() == pytest.approx(values.mean(), rel=1e-4)
    assert tailed_at(means, shares).std() == pytest.approx(values.std(), rel=0.02)
    assert tailed_at(means, shares).max() > values.max() > values_at(means, shares).max()
    assert tailed_at((7.0,), shares).tolist() == [7.0] * len(shares)


@pytest.fixture
def heavy(tmp_path: Path) -> tuple[Path, Any, Any]:
    """Outputs that depend on prompts, but not only rising; a few are a hundred times as long as most."""
    rng, n = np.random.default_rng(11), 4000
    inputs = rng.integers(50, 4000, n)
    typical = np.where((inputs > 1000) & (inputs < 2500), 40, 15)
    outputs = (typical * np.exp(1.3 * rng.standard_normal(n))).astype(int) + 1
    path = tmp_path / "heavy.csv"
    rows = zip(np.cumsum(rng.exponential(1.0, n)) + 1.7e9, inputs, outputs, strict=True)
    path.write_text("timestamp,input_tokens,output_tokens\n" + "".join(f"{t:.6f},{i},{o}\n" for t, i, o in rows))
    return path, inputs, outputs


def test_long_outputs_are_as_long_and_where_they_were(heavy: tuple[Path, Any, Any], tmp_path: Path) -> None:
    log, inputs, outputs = heavy
    table = build_plan(str(fit(log, tmp_path))).table
    prompts, drawn = (table[name].to_numpy() for name in ("input_tokens", "output_tokens"))
    assert drawn.mean() == pytest.approx(outputs.mean(), rel=0.003)
    assert drawn.max() > 1.1 * np.sort(outputs)[-GROUP:].mean()
    assert drawn.std() == pytest.approx(outputs.std(), rel=0.05)
    levels = [one.reshape(-1, 8).mean(axis=1) for one in (outputs, drawn)]
    assert np.sqrt(np.mean((levels[1] - levels[0]) ** 2)) < 0.2 * outputs.mean()
    sizes = [one.reshape(-1, 8).mean(axis=1) for one in (inputs, prompts)]
    assert np.sqrt(np.mean((sizes[1] - sizes[0]) ** 2)) < 0.02 * inputs.mean()
    middle = [o[(i > 1000) & (i < 2500)].mean() / o.mean() for i, o in ((inputs, outputs), (prompts, drawn))]
    assert middle[1] == pytest.approx(middle[0], rel=0.06)


def test_coarse_clocks_are_learned(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    path = tmp_path / "ticks.jsonl"
    ticks = np.repeat(np.arange(300), rng.poisson(10, 300)) * 3000
    path.write_text(
        "".join(json.dumps({"timestamp": int(t), "input_length": 50, "output_length": 5}) + "\n" for t in ticks)
    )
    found = tomllib.loads(fit(path, tmp_path).read_text())["fitted"]["arrivals"]
    assert found["tick_s"] == 3
    assert found["burstiness"] == pytest.approx(1, rel=0.25)
    times = build_plan(str(tmp_path / "fitted.toml")).table["arrival_ns"].to_numpy() / 1e9
    assert np.abs(times / 3 - np.rint(times / 3)).max() < 1e-6
    assert dispersion(times, 3.0) == pytest.approx(dispersion(ticks / 1e3, 3.0), rel=0.35)


def test_bursts_are_learned(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    times = np.cumsum(rng.gamma(0.2, 5.0, 3000))
    path = tmp_path / "bursts.csv"
    path.write_text("timestamp,input_tokens,output_tokens\n" + "".join(f"{t + 1.7e9:.6f},50,5\n" for t in times))
    drawn = build_plan(str(fit(path, tmp_path))).table["arrival_ns"].to_numpy() / 1e9
    for window in (1.0, 10.0):
        assert dispersion(drawn, window) == pytest.approx(dispersion(times, window), rel=0.3)


def test_batches_between_pauses_are_learned(tmp_path: Path) -> None:
    """Requests come in batches some 0.1 s apart, in bursts of different length between pauses of different length."""
    rng, times, now = np.random.default_rng(2), list[float](), 0.0
    for _ in range(60):
        for _ in range(int(rng.exponential(25)) + 1):
            times += [now + 0.001 * at for at in range(rng.integers(1, 6))]
            now += 0.1
        now += rng.exponential(20)
    path = tmp_path / "batches.csv"
    path.write_text("timestamp,input_tokens,output_tokens\n" + "".join(f"{t + 1.7e9:.6f},50,5\n" for t in times))
    plan = build_plan(str(fit(path, tmp_path)))
    drawn = plan.table["arrival_ns"].to_numpy() / 1e9
    assert len(drawn) == len(times)
    for window in (0.2, 1.0, 5.0, 20.0):
        assert dispersion(drawn, window) == pytest.approx(dispersion(times, window), rel=0.15)
    # The senders' clock stays: as many gaps as in the log last 0.1 s.
    clocked = [(np.abs(np.diff(one) - 0.1) < 0.01).mean() for one in (times, drawn)]
    assert clocked[1] == pytest.approx(clocked[0], rel=0.06)
    # At twice the rate each second has twice the requests, at the same times of the day.
    faster = build_plan(str(tmp_path / "fitted.toml"), rate_scale=2.0).table["arrival_ns"].to_numpy() / 1e9
    half = times[len(times) // 2]
    assert np.searchsorted(faster, half) == pytest.approx(2 * np.searchsorted(drawn, half), rel=0.03)


def test_whether_arrivals_come_before_or_after_a_pause_is_learned(tmp_path: Path) -> None:
    """Of each eight gaps one is a pause; in the course of the log it moves from the first place to the last."""
    rng, n = np.random.default_rng(3), 4000
    gaps = rng.exponential(0.05, (n // 8, 8))
    gaps[np.arange(n // 8), np.arange(n // 8) * 8 // (n // 8)] = rng.exponential(10, n // 8)
    stretch = np.repeat(np.arange(n // 8), 8)
    path = tmp_path / "pauses.csv"
    times = np.cumsum(gaps.ravel())
    path.write_text("timestamp,input_tokens,output_tokens\n" + "".join(f"{t + 1.7e9:.6f},50,5\n" for t in times))
    drawn = build_plan(str(fit(path, tmp_path))).table["arrival_ns"].to_numpy() / 1e9
    real, found = (stretch_centres(stretch, np.diff(one, prepend=0.0)) for one in (times, drawn))
    assert np.abs(found - real).mean() < 0.05


def test_bursts_of_earlier_versions_are_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    path = tmp_path / "bursts.csv"
    times = np.cumsum(rng.gamma(0.2, 5.0, 1000))
    path.write_text("timestamp,input_tokens,output_tokens\n" + "".join(f"{t + 1.7e9:.6f},50,5\n" for t in times))
    fitted = fit(path, tmp_path)
    text = fitted.read_text()
    without_centres = re.sub("step_centres = .*", "", text)
    assert without_centres != text
    for earlier in (text.replace("step_roots", "bursts"), without_centres):
        fitted.write_text(earlier)
        done = CliRunner().invoke(app, ["run", str(fitted)])
        assert done.exit_code == 2
        assert "fit the workload to the log again" in done.output.replace("\n", " ")


def test_stretches_of_longer_requests_are_learned(tmp_path: Path) -> None:
    """Prompts and outputs are long in other stretches; outputs also depend on the prompt."""
    rng = np.random.default_rng(5)
    n = 4000
    times, course = np.cumsum(rng.exponential(1.0, n)), np.arange(n) / n * 2 * np.pi
    inputs = (500 * np.exp(rng.normal(0, 0.6, n) + 0.5 * np.sin(3 * course))).astype(int) + 1
    outputs = (9e4 / (inputs + 300) * np.exp(rng.normal(0, 0.5, n) + 0.5 * np.sin(7 * course))).astype(int) + 1
    path = tmp_path / "drift.csv"
    rows = zip(times + 1.7e9, inputs, outputs, strict=True)
    path.write_text("timestamp,input_tokens,output_tokens\n" + "".join(f"{t:.6f},{i},{o}\n" for t, i, o in rows))
    fitted = fit(path, tmp_path)
    drift = tomllib.loads(fitted.read_text())["fitted"]["drift"]
    assert len(drift["prompts"]) == len(drift["outputs"]) == len(drift["output_roots"]) <= n / GROUP
    for scale in (1, 2):  # at twice the rate a stretch has twice the requests, and lasts as long
        table = build_plan(str(fitted), num_prompts=n * scale, rate_scale=float(scale)).table
        for name, real in (("input_tokens", inputs), ("output_tokens", outputs)):
            drawn = table[name].to_numpy().reshape(100, -1).mean(axis=1)
            assert drawn == pytest.approx(real.reshape(100, -1).mean(axis=1), rel=0.1), (scale, name)
        logs = [np.log(table[name].to_numpy()) for name in ("input_tokens", "output_tokens")]
        assert np.corrcoef(*logs)[0, 1] == pytest.approx(np.corrcoef(np.log(inputs), np.log(outputs))[0, 1], abs=0.05)


def test_one_long_output_does_not_make_its_neighbours_long(tmp_path: Path) -> None:
    """Outputs are heavy-tailed and in no order: one makes the mean of eight, and the others are as usual."""
    rng, n = np.random.default_rng(9), 4000
    outputs = (20 * np.exp(1.3 * rng.standard_normal(n))).astype(int) + 1
    path = tmp_path / "outliers.csv"
    rows = zip(np.cumsum(rng.exponential(1.0, n)) + 1.7e9, rng.integers(50, 900, n), outputs, strict=True)
    path.write_text("timestamp,input_tokens,output_tokens\n" + "".join(f"{t:.6f},{i},{o}\n" for t, i, o in rows))
    drawn = build_plan(str(fit(path, tmp_path))).table["output_tokens"].to_numpy()
    ranks = [np.argsort(np.lexsort((rng.random(n), one))) for one in (outputs, drawn)]
    neighbours = [np.corrcoef(one[:-1], one[1:])[0, 1] for one in ranks]
    assert neighbours[1] == pytest.approx(neighbours[0], abs=0.05)


def test_shared_prefixes_are_learned(tmp_path: Path) -> None:
    path = tmp_path / "prefixes.jsonl"
    rng = np.random.default_rng(4)
    fresh, rows, chats = 1, [], list[list[int]]()
    for at in range(1500):
        back = int(rng.integers(1, min(20, len(chats)) + 1)) if chats else 0
        ids = list(chats[-back]) if back and rng.random() < 0.6 else [0]
        more = int(rng.integers(1, 5))
        ids += range(fresh, fresh + more)
        fresh += more
        chats.append(ids)
        rows.append({"timestamp": 1000 * at, "input_length": 512 * len(ids) - 100, "output_length": 9, "hash_ids": ids})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    real = repeated_prefixes(read_trace(path).requests)["repeated_share"]
    assert not {"drift", "outputs"} & set(tomllib.loads(fit(path, tmp_path).read_text())["fitted"])
    table = build_plan(str(fit(path, tmp_path))).table
    assert block_tokens(table) == 512
    hashes = table["hash_ids"].combine_chunks()
    drawn = single_turn(table["input_tokens"].to_numpy(), table["output_tokens"].to_numpy(), hash_ids=hashes)
    assert repeated_prefixes(drawn)["repeated_share"] == pytest.approx(real, abs=0.03)
    found = [repeats_in(requests) for requests in (read_trace(path).requests, drawn)]
    lags = [np.median(one.lag[one.blocks > 1]) for one in found]
    assert lags[1] == pytest.approx(lags[0], rel=0.6)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4000), st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=40))
def test_prompts_repeat_no_more_than_asked(rows: list[tuple[int, int, int]]) -> None:
    inputs = np.array([one for one, _, _ in rows], np.int32)
    wanted = np.array([one for _, one, _ in rows], np.int64)
    lags = np.array([one for _, _, one in rows], np.float64)
    ids = shared_prefixes(inputs, wanted, lags, np.ones(len(rows)), 512)
    found = count_repeats(int_lists(ids.to_pylist()), inputs, 512)
    assert (found.blocks <= np.maximum(wanted, 0)).all()
    assert [len(one) for one in ids.to_pylist()] == (-(-inputs // 512)).tolist()


def test_sessions_and_pauses_are_learned(tmp_path: Path) -> None:
    path = tmp_path / "chat.csv"
    rng = np.random.default_rng(6)
    lines = []
    for session in range(200):
        start, history = float(rng.uniform(0, 4000)), 0
        for _ in range(int(rng.integers(1, 6))):
            prompt = history + int(rng.integers(30, 90))
            lines.append(f"{1.7e9 + start:.3f},{1.7e9 + start + 2:.3f},s{session},{prompt},40\n")
            history, start = prompt + 40, start + 2 + float(rng.exponential(10))
    path.write_text("start_time,end_time,session_id,input_tokens,output_tokens\n" + "".join(lines))
    plan = build_plan(str(fit(path, tmp_path))).table
    real = build_plan(f"log:{path}").table
    for name in ("turn", "input_tokens", "pause_ns"):
        values = [table[name].drop_null().to_numpy().mean() for table in (real, plan)]
        assert values[1] == pytest.approx(values[0], rel=0.1), name
    assert len(set(plan["session"].to_pylist())) == 200
    sessions = plan["session"].to_numpy()
    assert (np.diff(sessions) >= 0).all()
    # Sessions come in another order as wholes: each begins with its first turn, and its prompts grow.
    later = plan["turn"].to_numpy()[1:] > 0
    assert (plan["turn"].to_numpy()[1:][later] == plan["turn"].to_numpy()[:-1][later] + 1).all()
    assert (np.diff(plan["input_tokens"].to_numpy())[later] > 0).all()
    assert (np.diff(plan["content"].to_numpy())[later] == 0).all()
    assert len(set(plan["content"].to_pylist())) == 200


@pytest.mark.parametrize("beside", [False, True], ids=["in turns", "with sub-agents"])
def test_the_kind_of_pause_is_learned(beside: bool, tmp_path: Path) -> None:
    """Half of the turns call tools, which take 2 s; users take 30 s."""
    path = tmp_path / "kinds.csv"
    rng = np.random.default_rng(8)
    lines = []
    for session in range(200):
        start, prompt = 1.7e9 + 100 * session, 300
        for _ in range(5):
            calls = bool(rng.random() < 0.5)
            stop = "tool_calls" if calls else "stop"
            lines.append(f"{start:.3f},{start + 2:.3f},s{session},{prompt},40,{stop}\n")
            if beside and calls:
                lines.append(f"{start + 2.2:.3f},{start + 2.9:.3f},s{session},90,20,stop\n")
                lines.append(f"{start + 2.3:.3f},{start + 2.8:.3f},s{session},80,20,stop\n")
            start, prompt = start + 2 + float(rng.normal(2 if calls else 30, 0.1)), prompt + 100
    path.write_text("start_time,end_time,session_id,input_tokens,output_tokens,finish_reason\n" + "".join(lines))
    for table in (build_plan(source).table for source in (f"log:{path}", str(fit(path, tmp_path)))):
        tools = table["tool_ns"].drop_null().to_numpy()
        pauses = table["pause_ns"].filter(pc.is_valid(table["tool_ns"])).to_numpy()
        by_tools = tools > 0
        # How often requests overlap is drawn anew, and with it how many wait for tools.
        assert by_tools.mean() == pytest.approx(0.53 if beside else 0.5, rel=0.15 if beside else 0.05)
        assert (tools[by_tools] == pauses[by_tools]).all()
        if not beside:
            assert np.median(pauses[by_tools]) / 1e9 == pytest.approx(2, rel=0.1)
            assert np.median(pauses[~by_tools]) / 1e9 == pytest.approx(30, rel=0.1)


def test_logs_that_cannot_be_fitted_are_refused(azure: Path, tmp_path: Path) -> None:
    few = tmp_path / "few.csv"
    few.write_text("timestamp,input_tokens,output_tokens\n1.5,2,3\n2.5,2,3\n")
    edited = tmp_path / "edited.toml"
    edited.write_text("mine")
    for words, message in (
        ([f"log:{few}", "-o", str(tmp_path / "a.toml")], "too few to fit"),
        (["sharegpt", "-o", str(tmp_path / "a.toml")], "fit takes log:FILE"),
        ([f"log:{azure}", "-o", str(tmp_path / "a.json")], "must end in .toml"),
        ([f"log:{azure}", "-o", str(edited)], "exists; give another"),
    ):
        done = CliRunner().invoke(app, ["workloads", "fit", *words])
        assert done.exit_code == 2
        assert message in " ".join(done.output.split())
    assert edited.read_text() == "mine"


def test_side_requests_of_sessions_are_learned(tmp_path: Path) -> None:
    """Two sub-agents with short prompts beside the second turn; the third turn goes on after the second."""
    path = tmp_path / "agents.csv"
    rng = np.random.default_rng(4)
    lines = []
    for session in range(200):
        start, first = 1.7e9 + 20 * session, int(rng.integers(700, 900))
        second, third = first + 150, first + 300
        for begin, end, prompt in ((0, 2, first), (3, 6, second), (7, 8, 300), (7.1, 8, 320), (9, 10, third)):
            lines.append(f"{start + begin:.3f},{start + end:.3f},s{session},{prompt},50\n")
    path.write_text("start_time,end_time,session_id,input_tokens,output_tokens\n" + "".join(lines))
    real = build_plan(f"log:{path}").table
    content = real["content"].to_numpy().reshape(200, 5)
    assert (content[:, 1] == content[:, 0]).all()
    assert (content[:, 4] == content[:, 0]).all()
    assert all(len(set(row)) == 3 for row in content.tolist())
    assert len(set(content.ravel().tolist())) == 600
    plan = build_plan(str(fit(path, tmp_path))).table
    means = [table["input_tokens"].to_numpy().mean() for table in (real, plan)]
    assert means[1] == pytest.approx(means[0], rel=0.08)
    shares = [len(set(table["content"].to_pylist())) / len(table) for table in (real, plan)]
    assert shares[1] == pytest.approx(shares[0], rel=0.1)
    # Both sub-agents run at once, and the third turn waits for them.
    waits = [[turns for turns in table["after"].to_pylist() if turns is not None] for table in (real, plan)]
    assert len(waits[1]) == pytest.approx(len(waits[0]), rel=0.15)
    assert sum(len(turns) > 1 for turns in waits[1]) == pytest.approx(200, rel=0.2)
