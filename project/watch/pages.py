"""The templates of the pages, which open anywhere, without a server or a network, and run their own script alone.

In `pages/`: layout.html is the frame, run.html and runs.html are what is in it, page.css and page.js are ours. uPlot (MIT, see
uplot.license) draws the charts.
"""

import json
import re
import shlex
from base64 import b64encode
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from project.untrusted import printable
from project.watch.charts import number
from project.watch.history import Life, date

_FOLDER = Path(__file__).with_name("pages")
_LICENSE, _UPLOT, _OWN = ((_FOLDER / name).read_text() for name in ("uplot.license", "uplot.js", "page.js"))
_SCRIPT = f"/*! {_LICENSE}*/\n{_UPLOT}\n{_OWN}"
_STYLE = "\n".join((_FOLDER / name).read_text() for name in ("uplot.css", "page.css"))
_POLICY = (
    f"default-src 'none'; script-src 'sha256-{b64encode(sha256(_SCRIPT.encode()).digest()).decode()}'; "
    "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
)
"""A Content-Security-Policy: the page runs its own script and no other, and loads nothing; pictures are in it."""


def ranks(life: Life) -> str:
    return "1 rank" if life.ranks == 1 else f"{life.ranks} ranks"


def duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def size(count: int | None) -> str:
    """Returns a number of bytes as a text for people."""
    if count is None:
        return ""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count} bytes"


_PAGES = Environment(loader=FileSystemLoader(_FOLDER), autoescape=True, trim_blocks=True, lstrip_blocks=True, auto_reload=False)
_PAGES.filters |= {
    "number": number,
    "date": date,
    "ranks": ranks,
    "duration": duration,
    "size": size,
    "link": lambda path: quote(path),
    "shell": shlex.quote,
    "python": lambda text: json.dumps(text, ensure_ascii=False),
    "short_key": lambda name: ".".join(name.replace(".init_args", "").split(".")[-2:]),
    "png": lambda content: f"data:image/png;base64,{b64encode(content).decode()}",
    "breakable": lambda name: Markup("<wbr>").join(re.split(r"(?<=[./_])", name)),  # a dotted name
}
_PAGES.globals |= {"policy": _POLICY, "script": Markup(_SCRIPT), "style": Markup(_STYLE), "most_charts": 24}


def rendered(template: str, **values: object) -> str:
    return printable(_PAGES.get_template(template).render(values))
