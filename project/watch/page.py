"""The parts that the pages of one run and of several have in common."""

import base64
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from project.untrusted import printable
from project.watch.charts import Line, Mark, chart
from project.watch.history import OURS, SKIPPED

Chart = tuple[str, list[Line]]
"""A chart's title, and its lines."""
_CHARTS = 24  # in a section
_STYLE = """
:root{color-scheme:light dark;--grid:#8884;--soft:#777}
body{font:15px/1.5 system-ui,sans-serif;max-width:1180px;margin:24px auto;padding:0 16px}
h1{font-size:24px;margin:0}h2{font-size:18px;margin:32px 0 8px}.soft{color:var(--soft)}
table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:4px 12px 4px 0;border-bottom:1px solid var(--grid);
vertical-align:top}th{font-weight:600}.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(430px,1fr));gap:16px}
figure{margin:0;position:relative}figcaption{font-weight:600}svg{width:100%;height:auto;display:block}
svg text{font-size:11px;fill:var(--soft)}.grid{stroke:var(--grid)}
.mark{stroke:#6f7780;stroke-dasharray:3 3}.fault{stroke:#e0202d;stroke-width:2}
svg .nan{fill:#b8474f;font-size:15px}.legend span{margin-right:14px;font-size:13px}
.legend i{display:inline-block;width:12px;height:3px;margin-right:5px;vertical-align:middle}
.reading{font-size:12px;color:var(--soft);min-height:18px}.bar{display:flex;height:22px;border-radius:3px;overflow:hidden}
pre{overflow:auto;padding:10px;border:1px solid var(--grid);font-size:13px}.ERROR,.CRITICAL,.failed,.killed{color:#b8474f}
"""
_SCRIPT = """
for (const f of document.querySelectorAll('figure')) {
  const c = JSON.parse(f.dataset.chart), svg = f.querySelector('svg'), out = f.querySelector('.reading');
  svg.addEventListener('mousemove', e => {
    const box = svg.getBoundingClientRect(), [low, high, left, right] = c.x;
    const px = (e.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const x = low + (px - left) / (right - left) * (high - low);
    out.textContent = c.lines.filter(l => l.points.length).map(l => {
      const p = l.points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
      return `${l.name}: ${typeof p[1] === 'number' ? +p[1].toPrecision(5) : p[1]} at ${+p[0].toPrecision(6)}`;
    }).join('   ') + `  (${c.name})`;
  });
  svg.addEventListener('mouseleave', () => out.textContent = '');
}
"""


_ALLOWED = (
    f"default-src 'none'; script-src 'sha256-{base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()}'; "
    "style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)
"""A Content-Security-Policy: the page runs its own script and no other, and loads nothing."""


def html(title: str, parts: Sequence[str]) -> str:
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_ALLOWED}"><title>{printable(escape(title))}</title>'
        f"<style>{_STYLE}</style></head><body>{printable(''.join(parts))}<script>{_SCRIPT}</script></body></html>\n"
    )


def section(title: str, *content: str) -> Iterator[str]:
    if any(content):
        yield f"<h2>{escape(title)}</h2>"
        yield from content


def table(rows: Sequence[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Returns a table; its cells are HTML already."""
    top = f"<tr>{''.join(f'<th>{title}</th>' for title in head)}</tr>" if head else ""
    return f"<table>{top}{''.join('<tr>' + ''.join(f'<td>{cell}</td>' for cell in row) + '</tr>' for row in rows)}</table>"


def charts(all_charts: Iterable[Chart], x_name: str, marks: Sequence[Mark] = (), from_zero: bool = False) -> str:
    known = [(title, lines) for title, lines in all_charts if any(line.points for line in lines)]
    drawn = [chart(title, lines, x_name, marks, from_zero) for title, lines in known[:_CHARTS]]
    left = f'<p class="soft">and {len(known) - _CHARTS} more</p>' if len(known) > _CHARTS else ""
    return f'<div class="charts">{"".join(drawn)}</div>{left}' if drawn else ""


def of_the_module(tag: str) -> bool:
    return not tag.startswith(OURS) and tag not in ("epoch", SKIPPED, "train/fp16_skipped_steps")
