"""The HTML report in a browser: charts, controls, no requests to other files, names escaped."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ebbench.analysis.cases import comparison_cases
from ebbench.analysis.metrics import Slo
from ebbench.analysis.summary import summarise
from ebbench.fakeserver import FakeConfig, FakeServerProcess
from ebbench.records.run import Run
from ebbench.render import numbers
from ebbench.render.timeline import make_timeline
from ebbench.report import page as page_module
from ebbench.report.page import specs
from ebbench.report.page_data import comparison_tables
from tests.report.report_data import INK, BrowserPage, invoke, rewrite

ONLY_WITH = {"classes", "sessions"}
"""Charts of runs that have these."""
HOSTILE = "</script><script>alert('x')</script><img src=x onerror=alert(1)>\"'{{7*7}}&amp;`$"


def test_every_chart_is_drawn_without_requests_or_console_errors(browser_page: BrowserPage, page_file: Path) -> None:
    with browser_page(page_file) as page:
        assert page.evaluate("document.documentElement.dataset.ready") == "yes"
        assert [line for line in page.heard if not line.startswith("request: file:")] == []
        assert len([line for line in page.heard if line.startswith("request:")]) == 1
        charts = page.query_selector_all(".chart")
        assert {chart.get_attribute("data-chart") for chart in charts} == set(specs()) - ONLY_WITH
        for chart in charts:
            assert chart.get_attribute("data-state") == "drawn"
            assert int(chart.get_attribute("data-rows")) > 50
            assert 0.001 < chart.evaluate(INK) < 1


def test_classes_and_sessions_of_a_log_are_drawn(browser_page: BrowserPage, tmp_path: Path) -> None:
    rows = [
        {"timestamp": n / 10 + turn, "session_id": f"s{n}", "turn": turn, "input_length": 40 + n, "output_length": 20,
         "class": "chat" if n % 3 else "batch"}
        for n in range(60) for turn in range(1 + n % 3)
    ]  # fmt: skip
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = invoke("run", f"log:{log}", "-p", "v1", "-q", "-o", tmp_path / "run")
    assert done.exit_code == 0, done.output
    assert invoke("report", tmp_path / "run", "-o", tmp_path / "page.html").exit_code == 0
    with browser_page(tmp_path / "page.html") as page:
        for name in ONLY_WITH:
            assert page.query_selector(f'[data-chart="{name}"]').get_attribute("data-state") == "drawn"
        data = json.loads(page.inner_text("#data"))["runs"][0]
        assert {row["class"] for row in data["classes"]} == {"chat", "batch"}
        assert {row["turns"] for row in data["sessions"]} == {1, 2, 3}
        assert all(0 < row["model"] <= 1 for row in data["sessions"])


def test_of_a_run_over_http_open_requests_rate_and_ttft_are_drawn(browser_page: BrowserPage, tmp_path: Path) -> None:
    load = ("-n", "60", "--scenario", "poisson", "--request-rate", "60", "--input-len", "16", "--output-len", "8")
    with FakeServerProcess(FakeConfig(ttft_ms=20, itl_ms=2)) as server:
        done = invoke("run", "balanced", "--engine", server.url, *load, "--lag-limit-ms", "60000", "-q",
                      "-o", tmp_path / "run")  # fmt: skip
    assert done.exit_code == 0, done.output
    assert invoke("report", tmp_path / "run", "-o", tmp_path / "page.html").exit_code == 0
    with browser_page(tmp_path / "page.html") as page:
        timeline = page.query_selector('[data-chart="timeline"]')
        assert timeline.get_attribute("data-state") == "drawn"
        assert page.evaluate("document.documentElement.dataset.ready") == "yes"
        assert not [line for line in page.heard if "error" in line.lower()]
        assert page.query_selector("#about-drag").is_hidden()
        data = json.loads(page.inner_text("#data"))["runs"][0]
        assert all(data[name] for name in ("open", "rate", "ttft"))
        assert data["modes"] == []


def test_the_numbers_are_those_of_the_runs(browser_page: BrowserPage, page_file: Path, runs: Path) -> None:
    with browser_page(page_file) as page:
        table = page.query_selector("section.numbers table")
        heads = [cell.inner_text() for cell in table.query_selector_all("th")]
        rows = [
            [cell.inner_text() for cell in row.query_selector_all("td")] for row in table.query_selector_all("tbody tr")
        ]
        assert [row[0] for row in rows] == ["v1", "eb", "ebplus"]  # the baseline first, whatever the directories' order
        shown = {row[0]: dict(zip(heads, row, strict=True)) for row in rows}
        for name in ("v1", "eb", "ebplus"):
            metrics = summarise(Run.load(runs / name)).metrics
            assert shown[name]["out tok/s whole run"] == numbers.rate(metrics.output_throughput)
            assert shown[name]["E2EL median"] == numbers.duration_ms(metrics.e2el.median)
            assert shown[name]["TTFT median"] == numbers.duration_ms(metrics.ttft.median)
            assert shown[name]["SLO met"] == numbers.percent(metrics.slo_attainment)
        body = page.inner_text("body")
        assert "By phase" in body
        assert "in virtual time" in body
        assert Run.load(runs / "v1").manifest.plan_hash[:16] in body
        for warning in Run.load(runs / "v1").manifest.warnings:
            assert warning.sentence in body


def test_runs_with_different_limits_show_each_limit(runs: Path) -> None:
    def note(*limits: float) -> str:
        names = ("v1", "eb")
        pairs = zip(names, limits, strict=True)
        return comparison_tables(comparison_cases([summarise(Run.load(runs / n), Slo(ttft=ms)) for n, ms in pairs]))[
            0
        ].note

    assert note(5, 5).endswith("Limits: ttft:5 ms.")
    assert "Limits differ between the runs" in note(5, 6)


def test_tables_sort_by_value_both_ways(browser_page: BrowserPage, page_file: Path) -> None:
    with browser_page(page_file) as page:
        heads = page.query_selector_all("section.numbers table >> nth=0 >> th button")
        column = [head.inner_text() for head in heads].index("out tok/s whole run")
        body = "document.querySelector('section.numbers table').tBodies[0]"
        script = f"[...{body}.rows].map(row => Number(row.cells[{column}].dataset.v))"
        orders = []
        for _ in range(2):
            heads[column].click()
            orders.append(page.evaluate(script))
        assert orders[0] == sorted(orders[0])
        assert orders[1] == sorted(orders[1], reverse=True)
        assert orders[0] != orders[1]
        assert page.get_attribute("section.numbers th[aria-sort]", "aria-sort") == "descending"


def test_runs_phases_and_themes_can_be_chosen(browser_page: BrowserPage, page_file: Path) -> None:
    with browser_page(page_file) as page:
        timeline = page.query_selector("[data-chart=timeline]")
        before = timeline.get_attribute("data-rows")
        page.select_option("#run", "1")
        page.wait_for_function(
            "before => document.querySelector('[data-chart=timeline]').dataset.rows !== before", arg=before
        )
        phases = page.evaluate("[...document.querySelectorAll('#phase option')].map(o => o.value)")
        assert phases[0] == "all"
        assert len(phases) == 4
        page.select_option("#phase", phases[2])
        dark = "getComputedStyle(document.body).backgroundColor"
        light = page.evaluate(dark)
        page.click("#theme")
        assert page.evaluate(dark) != light
        page.wait_for_timeout(1_500)
        assert page.evaluate("[...document.querySelectorAll('.chart')].every(e => e.dataset.state === 'drawn')")
        assert [line for line in page.heard if "error" in line] == []


def drag_along_the_modes(page: Any, start: float, stop: float) -> None:
    """Drag from one share of the timeline's width to another on its first strip."""
    page.evaluate("document.querySelector('[data-chart=timeline]').scrollIntoView()")
    box = page.query_selector("[data-chart=timeline] canvas").bounding_box()
    page.mouse.move(box["x"] + start * box["width"], box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + stop * box["width"], box["y"] + 50, steps=5)
    page.mouse.up()
    page.wait_for_timeout(500)


def steps_shown(page: Any) -> int:
    shown = re.search(r": ([\d,]+) steps", page.inner_text("#about-zoom"))
    assert shown is not None
    return int(shown[1].replace(",", ""))


def test_a_brush_and_buttons_zoom_into_single_steps(browser_page: BrowserPage, page_file: Path, runs: Path) -> None:
    with browser_page(page_file) as page:
        label = page.evaluate("document.querySelector('#run').selectedOptions[0].text")
        whole = Run.load(runs / label).manifest.rows["steps"]
        assert steps_shown(page) == whole
        steps = page.query_selector("[data-chart=steps]")
        ink = [steps.evaluate(INK)]
        drag_along_the_modes(page, 0.3, 0.4)
        counts = [whole, steps_shown(page)]
        ink.append(steps.evaluate(INK))
        for name, repeats in (("closer", 3), ("wider", 1)):
            for _ in range(repeats):
                page.click(f"[data-zoom={name}]")
            page.wait_for_timeout(500)
            counts.append(steps_shown(page))
            ink.append(steps.evaluate(INK))
        assert counts[0] > counts[1] > counts[3] > counts[2] > 0
        assert len(set(ink)) == 4
        before = page.inner_text("#about-zoom")
        page.click("[data-zoom=later]")
        page.wait_for_timeout(500)
        assert page.inner_text("#about-zoom") != before
        page.click("[data-zoom=all]")
        page.wait_for_timeout(500)
        assert steps_shown(page) == whole
        assert [line for line in page.heard if "error" in line] == []


DASHED = """element => {
  // Columns of the canvas where grey stands above grey in many rows: the lines at which phases begin.
  const canvas = element.querySelector('canvas');
  const { data, width, height } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  const grey = (x, y) => {
    const [r, g, b, a] = data.slice(4 * (y * width + x), 4 * (y * width + x) + 4);
    return a > 60 && r > 100 && r < 200 && Math.abs(r - g) < 4 && Math.abs(g - b) < 4;
  };
  const columns = [];
  for (let x = 0; x < width; x++) {
    let rows = 0;
    for (let y = 0; y < height; y++) rows += grey(x, y);
    if (rows > 0.25 * height && !(columns.length && x - columns[columns.length - 1] < 3)) columns.push(x);
  }
  return columns;
}"""


def test_phases_of_the_scenario_are_marked_in_the_timeline(
    browser_page: BrowserPage, page_file: Path, runs: Path
) -> None:
    with browser_page(page_file) as page:
        timeline = page.query_selector("[data-chart=timeline]")
        columns = timeline.evaluate(DASHED)
        label = page.evaluate("document.querySelector('#run').selectedOptions[0].text")
        phases = make_timeline(Run.load(runs / label)).phases
        starts = [phase["t"] for phase in phases]
        told = page.inner_text("#about-phases")
        assert all(f"{phase['label']} ({phase['t']:.1f} s)" in told for phase in phases)
        assert len(columns) == len(starts) == 3
        measured = (columns[1] - columns[0]) / (columns[2] - columns[0])
        assert measured == pytest.approx((starts[1] - starts[0]) / (starts[2] - starts[0]), abs=0.02)


def test_hovering_over_a_line_shows_its_value(browser_page: BrowserPage, page_file: Path) -> None:
    with browser_page(page_file) as page:
        chart = page.query_selector("[data-chart=cdf_tpot] canvas")
        chart.scroll_into_view_if_needed()
        box = chart.bounding_box()
        shares = set()
        for place in range(160):
            row, column = place // 40, place % 40
            page.mouse.move(box["x"] + 60 + (box["width"] - 70) * column / 40, box["y"] + 60 + 40 * row)
            page.wait_for_timeout(20)
            told = page.evaluate("document.querySelector('#vg-tooltip-element.visible')?.innerText")
            if told:
                shares |= set(re.findall(r"share\s+([\d.]+)%", told))
        assert len(shares) > 3  # a line's own tooltip would show its first point wherever the pointer is


def test_a_wide_window_shows_every_table_without_horizontal_scrolling(
    browser_page: BrowserPage, page_file: Path
) -> None:
    with browser_page(page_file, width=1200) as page:
        widths = page.evaluate("[...document.querySelectorAll('.scroll')].map(e => [e.scrollWidth, e.clientWidth])")
        assert len(widths) == 4
        assert all(wanted <= there for wanted, there in widths)
        assert page.query_selector(".scroll.more") is None


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_screen_shows_the_page_without_horizontal_scrolling(
    browser_page: BrowserPage, page_file: Path, scheme: str, tmp_path: Path
) -> None:
    with browser_page(page_file, width=360, scheme=scheme, touch=True) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        back = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (back == "rgb(255, 255, 255)") == (scheme == "light")
        widths = page.evaluate(
            "[...document.querySelectorAll('.chart canvas')].map(c => c.getBoundingClientRect().right)"
        )
        assert widths
        assert max(widths) <= 360
        # The comparison is wider than a phone: it scrolls by itself, says so, and the run's name stays.
        assert page.query_selector("section.numbers .scroll.more") is not None
        page.evaluate("document.querySelector('section.numbers .scroll').scrollLeft = 1e6")
        page.wait_for_timeout(200)
        assert page.query_selector("section.numbers .scroll").get_attribute("class") == "scroll"
        name = page.query_selector("section.numbers tbody td").bounding_box()
        assert 0 <= name["x"] < 60
        page.screenshot(path=tmp_path / "phone.png", full_page=True)
        assert (tmp_path / "phone.png").stat().st_size > 50_000


def test_hostile_names_are_only_text(browser_page: BrowserPage, runs: Path, tmp_path: Path) -> None:
    for name in ("v1", "ebplus"):
        shutil.copytree(runs / name, tmp_path / name)
        rewrite(tmp_path / name, policy=f"{name}{HOSTILE}", model=HOSTILE, device=HOSTILE, workload=HOSTILE)
    target = tmp_path / "report.html"
    done = invoke("report", tmp_path / "v1", tmp_path / "ebplus", "--title", HOSTILE, "-o", target)
    assert done.exit_code == 0, done.output
    with browser_page(target) as page:
        assert page.evaluate("document.documentElement.dataset.ready") == "yes"
        assert [line for line in page.heard if not line.startswith("request: file:")] == []
        assert page.inner_text("h1") == HOSTILE
        assert page.title() == HOSTILE
        assert page.query_selector("img") is None
        assert page.evaluate("document.scripts.length") == 3


def test_the_file_refers_to_nothing_outside(page_file: Path) -> None:
    """In addition to the browser's log of requests: no URL in any attribute that is fetched."""
    text = page_file.read_text(encoding="utf-8")
    markup = re.sub(r"<script[^>]*>.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r"(src|href)\s*=\s*[\"'](?!data:)", markup)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert "default-src &#39;none&#39;" in policy[1] or "default-src 'none'" in policy[1]
    assert "unsafe-eval" not in policy[1]
    assert text.count("<script") == 3 + page_module.library().count("<script")


def test_a_run_without_steps_still_has_a_page(browser_page: BrowserPage, runs: Path, tmp_path: Path) -> None:
    """A server without the scheduler plugin records no steps: its page shows requests over time."""
    import pyarrow.parquet as pq

    shutil.copytree(runs / "v1", tmp_path / "v1")
    for name in ("steps", "decisions"):
        path = tmp_path / "v1" / f"{name}.parquet"
        pq.write_table(pq.read_table(path).slice(0, 0), path)
    manifest = tmp_path / "v1" / "manifest.json"
    manifest.write_text(re.sub(r'"(steps|decisions)": \d+', r'"\1": 0', manifest.read_text()))
    done = invoke("report", tmp_path / "v1", "-o", tmp_path / "report.html")
    assert done.exit_code == 0, done.output
    with browser_page(tmp_path / "report.html") as page:
        assert page.get_attribute("[data-chart=timeline]", "data-state") == "drawn"
        assert page.get_attribute("[data-chart=cdf_ttft]", "data-state") == "drawn"
        assert [line for line in page.heard if "error" in line] == []


def test_repeats_get_a_paired_comparison(browser_page: BrowserPage, tmp_path: Path) -> None:
    done = invoke(
        "run", "balanced", "--source", "profile", "-n", "40", "-c", "8", "--input-len", "32", "--output-len", "8",
        "-p", "v1", "-p", "v0", "--repeats", "3", "-q", "--engine", "sim", "-o", tmp_path / "out",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert invoke("report", tmp_path / "out", "-o", tmp_path / "r.html").exit_code == 0
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "Paired: v0 against v1" in text
    assert "v1 seed 0" in text
    assert "seeds 0–2" in text
    with browser_page(tmp_path / "r.html") as page:
        rows = [
            [cell.inner_text() for cell in row.query_selector_all("td")]
            for row in page.query_selector_all("section.numbers >> nth=0 >> tbody tr")
        ]
    output = [
        [summarise(Run.load(path)).metrics.output_throughput for path in sorted((tmp_path / "out").glob(f"{name}-*"))]
        for name in ("v1", "v0")
    ]
    ratios = [b / a for a, b in zip(*output, strict=True)]
    gain, spread = np.exp(np.mean(np.log(ratios))) - 1, 100 * np.std(ratios, ddof=1)
    assert [row[0] for row in rows] == ["v1", "v0"]  # seeds are aggregated as on the terminal
    assert rows[0][2] == "–"
    assert rows[1][2] == f"{numbers.change(gain)}\n±{spread:.1f} %"


def test_requests_that_failed_are_told(browser_page: BrowserPage, runs: Path, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    shutil.copytree(runs / "v1", tmp_path / "v1")
    path = tmp_path / "v1" / "requests.parquet"
    table = pq.read_table(path)
    status = ["timed_out", "failed", *table["status"].to_pylist()[2:]]
    index = table.column_names.index("status")
    pq.write_table(table.set_column(index, table.schema.field(index), pa.array(status, table["status"].type)), path)
    done = invoke("report", tmp_path / "v1", "-o", tmp_path / "report.html")
    assert done.exit_code == 0, done.output
    with browser_page(tmp_path / "report.html") as page:
        assert f"v1: {len(status) - 2:,} of {len(status):,} completed; 1 failed, 1 timed out." in page.inner_text(
            "main"
        )
        assert page.inner_text("section.numbers tbody td.strong") == f"{len(status) - 2:,} of {len(status):,}"


def test_report_refuses_bad_arguments_with_their_exit_code(runs: Path, tmp_path: Path) -> None:
    for arguments, code, message in (
        ((runs / "nothing",), 3, "no such run directory"),
        ((runs, "-o", tmp_path), 2, "is a directory"),
        ((runs, "--export", "pdf"), 2, "unknown export 'pdf'"),
        ((runs, "--export", "vllm", "--html"), 2, "give either"),
    ):
        done = invoke("report", *arguments)
        assert (done.exit_code, done.stderr.count("\n")) == (code, 1)
        assert message in done.stderr


def test_a_legend_has_as_many_columns_as_its_names_leave_room_for() -> None:
    def pixels_a_name(*policies: str) -> float:
        text = json.dumps(specs(policies)["cdf_ttft"])
        [found] = {float(px) for px in re.findall(r"floor\(width / ([0-9.]+)\)", text)}
        return found

    assert pixels_a_name("v1", "eb") < pixels_a_name("v1", "cadence:every=16") < 240


def test_each_load_and_environment_has_its_own_table_and_verdict(browser_page: BrowserPage, tmp_path: Path) -> None:
    for rate in (2, 4):
        done = invoke(
            "run", "balanced", "--source", "profile", "-n", "30", "--request-rate", rate, "--input-len", "32",
            "--output-len", "8", "-p", "v1", "-p", "v0", "-q", "--engine", "sim", "-o", tmp_path / "runs" / str(rate),
        )  # fmt: skip
        assert done.exit_code == 0, done.output
    assert invoke("report", tmp_path / "runs", "-o", tmp_path / "r.html").exit_code == 0
    with browser_page(tmp_path / "r.html") as page:
        titles = [title.inner_text() for title in page.query_selector_all("section.numbers h2")]
        assert titles == ["Comparison: rate 2/s", "Comparison: rate 4/s"]
        assert [head.inner_text() for head in page.query_selector_all(".verdict h3")] == ["rate 2/s", "rate 4/s"]
        for table in page.query_selector_all("section.numbers table"):
            assert [row.query_selector("td").inner_text() for row in table.query_selector_all("tbody tr")] == [
                "v1",
                "v0",
            ]
        assert [option.inner_text() for option in page.query_selector_all("#case option")] == ["rate 2/s", "rate 4/s"]
        before = page.query_selector("[data-chart=cdf_e2el] canvas").screenshot()
        page.select_option("#case", "1")
        page.wait_for_timeout(2_000)
        assert page.query_selector("[data-chart=cdf_e2el] canvas").screenshot() != before
        assert page.evaluate("[...document.querySelectorAll('.chart')].every(e => e.dataset.state === 'drawn')")
        assert [line for line in page.heard if "error" in line] == []


def test_the_library_of_a_page_is_made_once_for_all_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundles = iter(["a</script>b"])  # a second one is not asked for
    vl_convert = SimpleNamespace(__version__="9.9", javascript_bundle=lambda: next(bundles))
    monkeypatch.setattr(page_module, "need", lambda *_: vl_convert)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    page_module.library.cache_clear()
    try:
        for _ in range(2):
            assert page_module.library() == "a<\\/script>b"
            page_module.library.cache_clear()
        [kept] = tmp_path.glob("ebbench/*.js")
        kept.write_text(kept.read_text()[:-1])  # of a full disk, or edited
        bundles = iter(["a</script>c"])
        assert page_module.library() == "a<\\/script>c"
        page_module.library.cache_clear()
        bundles = iter(["a</script>b"])
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # no folder can be made there
        assert page_module.library() == "a<\\/script>b"
    finally:
        page_module.library.cache_clear()
