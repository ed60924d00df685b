"""The HTML report: one self-contained file with tables, charts and the library that draws them; no network access."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import asdict
from functools import cache
from pathlib import Path

from ebbench import __version__
from ebbench.extras import need
from ebbench.records import files
from ebbench.render import palette
from ebbench.render.palette import policy_colours
from ebbench.report.charts import LATENCIES, specs
from ebbench.report.page_data import Page

_PARTS = Path(__file__).parent / "page"


def render(page: Page) -> str:
    """The text of the file.

    Names are escaped in HTML and JSON; its content security policy allows only these scripts.
    """
    jinja2 = need("jinja2", "the HTML report")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_PARTS), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    scripts = [library(), (_PARTS / "page.js").read_text(encoding="utf-8")]
    text: str = environment.get_template("page.html.j2").render(
        page=asdict(page),
        charts=[f"cdf_{name}" for name in LATENCIES],
        data={
            "specs": specs(page.policies) | {f"search{i}": each.chart for i, each in enumerate(page.searches)},
            "shared": page.shared,
            "runs": page.runs,
            "labels": page.labels,
            "policies": page.policies,
            "colours": policy_colours(page.policies),
            "on_dark": palette.ON_DARK,
        },
        style=(_PARTS / "page.css").read_text(encoding="utf-8"),
        scripts=scripts,
        policy=content_policy(scripts),
        version=__version__,
    )
    return text


@cache
def library() -> str:
    """Vega, Vega-Lite and Vega-Embed in one script, safe inside a script element."""
    bundle: str = need("vl_convert", "the HTML report").javascript_bundle()
    return bundle.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def content_policy(scripts: list[str]) -> str:
    """A content security policy without external sources and eval; it allows only scripts with these hashes."""
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def write(page: Page, path: Path) -> None:
    """Write the file. Raises RunError if that fails."""
    files.write_text(str(render(page)), path)
