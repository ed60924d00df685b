"""Figures and timelines: the data drawn are the run's, and every format is written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner, Result

from ebbench.cli.main import app
from ebbench.errors import DataError, UnknownNameError, UsageError
from ebbench.hazard import analyse_lengths
from ebbench.papers import published
from ebbench.papers.eb.lengths import hazard_panels
from ebbench.papers.eb.step_times import step_ms
from ebbench.papers.eb.thresholds import sweep12
from ebbench.papers.eb.workloads import MODELS6
from ebbench.papers.options import PaperOptions
from ebbench.papers.registry import FIGURES, find_figure
from ebbench.papers.table import PaperFigure
from ebbench.records.run import Run
from ebbench.render import palette
from ebbench.render.figures import save, surface_chart
from ebbench.render.timeline import BINS, make_timeline, timeline_chart
from ebbench.report.page import specs
from ebbench.runs.store import RunStore, run_missing
from ebbench.spec.run import simulated
from vllm_eb.policy import policy_types


def invoke(*args: str) -> Result:
    return CliRunner().invoke(app, list(args), env={"COLUMNS": "120"})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """EB+ through a change of concurrency, long enough for its controller to update."""
    store = RunStore(tmp_path_factory.mktemp("cells"))
    cell = simulated("balanced", "ebplus", "rtx-pro-6000", "qwen3-8b", 256, 4096, "concurrency-shift", num_prompts=900)
    run_missing([cell], store, workers=1)
    found = store.get(cell)
    assert found is not None
    return found.run


def test_the_timeline_holds_what_the_run_recorded(run: Run) -> None:
    line = make_timeline(run)
    steps = run.steps
    end_s = max(steps["end_ns"].to_pylist()) / 1e9
    assert line.modes[0]["t"] == pytest.approx(min(steps["start_ns"].to_pylist()) / 1e9)
    assert line.modes[-1]["t2"] == pytest.approx(end_s)
    assert {row["series"] for row in line.modes} <= {"exclusive", "mixed"}
    assert [row["label"] for row in line.phases] == ["c=32", "c=512", "c=1024", "c=256", "c=2048"]
    assert max(row["value"] for row in line.kv) <= 100
    waiting = [row["value"] for row in line.queue if row["series"] == "waiting"]
    assert 0 < max(waiting) <= max(steps["waiting"].to_pylist())
    assert len(waiting) <= BINS
    assert {row["series"] for row in line.sizes} == {"k*", "N*", "N_obs"}
    assert len({row["series"] for row in line.sides}) == 2


def test_the_timelines_throughput_adds_up_to_the_tokens(run: Run) -> None:
    rows = make_timeline(run).throughput
    width = rows[1]["t"] - rows[0]["t"]
    requests = run.requests
    tokens = sum(sum(requests[name].to_pylist()) for name in ("input_tokens", "output_tokens"))
    assert sum(row["value"] for row in rows) * width == pytest.approx(tokens, rel=1e-6)


@pytest.mark.parametrize("kind", ["pdf", "svg", "png"])
def test_a_timeline_is_written_in_every_format(run: Run, tmp_path: Path, kind: str) -> None:
    (path,) = save(timeline_chart(make_timeline(run)), tmp_path / "t", [kind], legend="top")
    head = {"pdf": b"%PDF", "svg": b"<svg", "png": b"\x89PNG"}[kind]
    assert path.read_bytes().startswith(head)


def test_unknown_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="figure format"):
        save(alt.Chart().mark_point(), tmp_path / "t", ["jpg"])


def of_a_server(run: Run) -> Run:
    """The same run as if a server had carried it out, which reports no steps."""
    return Run(run.path, run.manifest, {"steps": run.steps.slice(0, 0), "requests": run.requests})


def test_without_steps_the_timeline_is_that_of_the_requests(run: Run, tmp_path: Path) -> None:
    line = make_timeline(of_a_server(run))
    assert [*line.modes, *line.queue, *line.kv] == []
    assert len(line.phases) == 5
    open_at = {name: {r["t"]: r["value"] for r in line.open if r["series"] == name} for name in palette.OPEN}
    sent, first, end = (np.array(run.requests[f"{name}_ns"]) / 1e9 for name in ("sent", "first_token", "end"))
    for t in list(open_at["being answered"])[::40]:
        assert open_at["waiting for a first token"][t] == ((sent <= t) & (first > t)).sum()
        assert open_at["being answered"][t] == ((first <= t) & (end > t)).sum()
    rows = [row for row in line.rate if row["series"] == "completed"]
    assert sum(row["value"] for row in rows) * (rows[1]["t"] - rows[0]["t"]) == pytest.approx(run.requests.num_rows)
    assert {row["series"] for row in line.ttft} == {"median", "p90"}
    (path,) = save(timeline_chart(line), tmp_path / "t", ["svg"], legend="top")
    assert b"open requests" in path.read_bytes()


def test_a_run_that_sent_nothing_has_no_timeline(run: Run) -> None:
    requests, nothing = run.requests, pa.nulls(run.requests.num_rows, pa.int64())
    unsent = requests.set_column(requests.schema.get_field_index("sent_ns"), "sent_ns", nothing)
    with pytest.raises(DataError, match="no request was sent"):
        make_timeline(Run(run.path, run.manifest, {"steps": run.steps.slice(0, 0), "requests": unsent}))


def test_attainment_is_drawn_for_every_phase(run: Run) -> None:
    spec = surface_chart(run).to_dict()
    panels = [panel for line in spec["vconcat"] for panel in line["hconcat"]]
    assert len(panels) == 6, "the whole and five phases"


def test_colours_are_told_apart_without_colour_vision() -> None:
    """Okabe and Ito's colours differ in lightness; no two series of one figure share one."""
    assert len(set(palette.SERIES)) == len(palette.SERIES)
    policies = list(policy_types())
    assert len(set(palette.policy_colours(policies))) == len(policies)
    names = ["v1", "eb:k=4", "eb:k=8", "my server", "ebplus (rate 5/s)", "ebplus (rate 9/s)"]
    found = palette.policy_colours(names)
    assert len(set(found)) == len(names)
    assert (found[0], found[1], found[4]) == (palette.BLUE, palette.VERMILION, palette.GREEN)
    assert len(palette.policy_colours([f"label {n}" for n in range(20)])) == 20


def meanings(spec: Any) -> dict[str, set[str]]:
    """Colours of all named series in a specification."""
    found: dict[str, set[str]] = {}
    if isinstance(spec, dict):
        scale = spec.get("scale") or {}
        named = isinstance(scale, dict) and "domain" in scale  # names of classes come with the data
        if named and str(scale.get("range", [""])[0]).startswith("#"):
            for name, colour in zip(scale["domain"], scale["range"], strict=True):
                found.setdefault(name, set()).add(colour)
        spec = list(spec.values())
    for part in spec if isinstance(spec, list) else []:
        for name, colours in meanings(part).items():
            found.setdefault(name, set()).update(colours)
    return found


def test_a_meaning_has_one_colour_in_figures_and_on_the_page(run: Run) -> None:
    drawn = meanings([timeline_chart(make_timeline(run)).to_dict(), *specs().values()])
    assert {"exclusive", "mixed", "prefill", "decode", "running", "waiting", "N*", "k*", "N_obs"} <= set(drawn)
    assert {name: len(colours) for name, colours in drawn.items()} == dict.fromkeys(drawn, 1)
    assert drawn["exclusive"] != drawn["mixed"]


def test_colours_are_written_down_in_the_palette_only() -> None:
    """Plain black, white and greys of the house style apart, no module names a colour of its own."""
    for path in Path("ebbench").glob("**/*.py"):
        if path.name not in ("palette.py", "figures.py"):
            coloured = re.findall(r"#(?![0fF]{6})([0-9A-Fa-f]{6})\b", path.read_text(encoding="utf-8"))
            assert not coloured, path


def test_figure_1_takes_the_cost_models_step_times() -> None:
    class Cost:
        def step_s(self, shape):  # type: ignore[no-untyped-def]
            chunk = sum(tokens for tokens, _ in shape.prefill)
            return 1e-3 * (chunk + 10 * shape.decode_seqs + shape.decode_kv_tokens)

    cost = Cost()
    assert step_ms(cost, 100, 0.0, 8) == pytest.approx(100)
    assert step_ms(cost, 100, 1.0, 8) == pytest.approx(100 * 10 + 800)
    assert step_ms(cost, 100, 0.5, 8) == pytest.approx(50 + 500 + 400)


def test_a_figure_is_found_by_several_spellings() -> None:
    assert find_figure("fig-3") is find_figure("3") is find_figure("Figure3")
    assert [figure.name.removeprefix("figure") for figure in FIGURES] == [str(n) for n in range(1, 13)]
    with pytest.raises(UnknownNameError, match="did you mean 'figure11'"):
        find_figure("figure111")


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_every_figure_can_be_drawn_from_nothing(figure, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Without stored runs the chart holds the published values alone; its structure must be sound all the same."""
    options, store = PaperOptions(num_prompts=300), RunStore(tmp_path)
    for chart in (figure.chart(options, store, True), figure.drawn(options, store)[0]):
        assert chart.to_dict()["$schema"].startswith("https://vega.github.io/schema/vega-lite")


def test_bars_of_figure_4_hold_published_values_and_ours(tmp_path: Path) -> None:
    figure, options = find_figure("4"), PaperOptions(devices=("h200",), num_prompts=50)
    store = RunStore(tmp_path)
    cells = [cell for cell in figure.cells(options) if cell.plan.workload == "balanced"]
    run_missing(cells, store, workers=1, whole=False)
    spec = figure.chart(options, store, True).to_dict()
    rows = [row for data in spec["datasets"].values() for row in data] if "datasets" in spec else _inline(spec)
    ours = [row for row in rows if row.get("source") == "ours"]
    published = [row for row in rows if row.get("source") == "published"]
    assert len(ours) == 9, "three policies, three metrics, one workload"
    assert {row["value"] for row in published} >= {20.26}, "v1's published rate on H200, balanced"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (PaperOptions(num_prompts=50), "50 requests a run"),
        (PaperOptions(devices=("h100",)), "device h100"),
        (PaperOptions(models=("qwen2.5-7b",)), "model qwen2.5-7b"),
    ],
    ids=["requests", "device", "model"],
)
@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_a_caption_says_what_was_run(figure: PaperFigure, options: PaperOptions, said: str, tmp_path: Path) -> None:
    """Where the setting is not the published one, published marks are left out as well."""
    if said.split()[0] not in figure.reads and "num_prompts" not in (figure.reads if options.num_prompts else ()):
        return
    if figure.name == "figure7" and options.models:
        with pytest.raises(UsageError, match="figure7 has none of qwen2"):
            figure.drawn(options, RunStore(tmp_path))
        return
    chart, caption = figure.drawn(options, RunStore(tmp_path))
    assert caption.startswith(f"Run with {said} instead of the figure's own setting")
    rows = _inline(chart.to_dict()) or [row for data in chart.to_dict().get("datasets", {}).values() for row in data]
    assert not [row for row in rows if "published" in (row.get("source"), row.get("mark"))]


def test_a_caption_of_the_published_setting_adds_nothing(tmp_path: Path) -> None:
    figure = find_figure("8")
    assert figure.drawn(PaperOptions(), RunStore(tmp_path))[1] == figure.caption


def test_the_bars_of_figure_6_stand_beside_print(tmp_path: Path) -> None:
    """The text's ranges: 8 to 17 % more requests/s than v1, 17 to 47 % less TPOT."""
    chart, _ = find_figure("6").drawn(PaperOptions(), RunStore(tmp_path))
    rows = [row for row in _inline(chart.to_dict()) if row.get("source") == "published"]
    assert {row["series"] for row in rows} == {"v0", "v1", "EB(k*)"}
    assert len({(row["x"], row["series"], row["value"]) for row in rows}) == 36
    rates = {
        (row["model"], row["method"]): (float(row["rps"]), float(row["tpot_ms"]))
        for row in published.rows("eb_vllm/figure6_models")
    }
    gains = [rates[model, "Ours"][0] / rates[model, "v1"][0] - 1 for model in MODELS6]
    assert (min(gains), max(gains)) == pytest.approx((0.08, 0.17), abs=0.006)
    falls = [1 - rates[model, "Ours"][1] / rates[model, "v1"][1] for model in MODELS6]
    assert (min(falls), max(falls)) == pytest.approx((0.17, 0.47), abs=0.006)


def _inline(node: object) -> list[dict]:  # type: ignore[type-arg]
    if isinstance(node, dict):
        data = node.get("data")
        own = data.get("values", []) if isinstance(data, dict) else []
        return [*own, *(row for value in node.values() for row in _inline(value))]
    if isinstance(node, list):
        return [row for value in node for row in _inline(value)]
    return []


def test_figure_12_averages_over_its_seeds(tmp_path: Path) -> None:
    options, store = PaperOptions(num_prompts=40), RunStore(tmp_path)
    cells = [
        c
        for c in find_figure("12").cells(options)
        if c.policy == "eb:k=128" and c.plan.workload.endswith("hazard-gamma-2.toml")
    ]
    cells = [cell for cell in cells if cell.device == "h200"]
    assert len(cells) == 3
    run_missing(cells, store, workers=1, whole=False)
    (point,) = sweep12(options, store, "2", slow=False)
    found: list[Any] = [store.get(cell) for cell in cells]
    rates = [measured.get("total_token_throughput") for measured in found]
    assert point["value"] == pytest.approx(np.mean(rates))
    assert point["low"] < min(rates) + (max(rates) - min(rates)) < point["high"] * 1.5


def test_hazard_panels_hold_every_answer() -> None:
    lengths = np.minimum(np.random.default_rng(0).geometric(1 / 40, 1000), 80)
    spec = hazard_panels(analyse_lengths(lengths), "made up").to_dict()
    bars = [row for row in _inline(spec) if "x2" in row]
    assert sum(row["value"] for row in bars) == pytest.approx(1.0)
    cut = (lengths == 80).mean()
    assert bars[-1]["value"] >= cut


def test_the_command_draws_and_says_what_is_missing(run: Run, tmp_path: Path) -> None:
    done = invoke("figures", "timeline", str(run.path), "-o", str(tmp_path), "-f", "svg")
    assert done.exit_code == 0, done.output
    assert len(list(tmp_path.glob("timeline-*.svg"))) == 1
    missing = invoke("figures", "3", "--runs", str(tmp_path / "none"), "-o", str(tmp_path))
    assert missing.exit_code == 3
    assert "30 of 30 runs of figure3 are not stored" in missing.output
    assert invoke("figures", "timeline").exit_code == 2
    named = invoke("figures", "timeline", str(run.path), "-o", str(tmp_path / "mine.svg"))
    assert named.exit_code == 2, "a folder of that name was made"
    assert not (tmp_path / "mine.svg").exists()
    assert "timeline" in invoke("figures").output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("3", "--device", "nosuch"), "unknown device 'nosuch'"),
        (("3", "--workload", "balanced"), "figure3 does not use --workload; it uses --device, --model"),
        (("3", "some/run"), "figure3 does not use PATHS"),
        (("3", "--num-prompts", "0"), "--num-prompts must be at least 1"),
        (("12", "--seeds", "1"), "--seeds must be at least 3 here"),
        (("99",), "figure9, slo, timeline"),
        (("timeline", "RUN", "--format", ""), "write any of pdf,svg,png"),
        (("timeline", "RUN", "--format", "jpg"), "unknown figure format 'jpg'"),
        (("timeline", "RUN", "--device", "h200"), "`ebbench figures timeline` does not use --device"),
    ],
)
def test_figures_refuses_wrong_options_before_it_draws(
    args: tuple[str, ...], message: str, run: Run, tmp_path: Path
) -> None:
    given = [str(run.path) if arg == "RUN" else arg for arg in args]
    done = invoke("figures", *given, "--runs", str(tmp_path / "none"), "-o", str(tmp_path / "drawn"))
    assert done.exit_code == 2
    assert message in done.output
    assert not (tmp_path / "drawn").exists()
