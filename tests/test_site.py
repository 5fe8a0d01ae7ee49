"""The site of the pages: it builds without a warning, and each link in it leads somewhere."""

import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.cluster.machine import missing
from tests.conftest import PATIENCE, ROOT, environment


class Page(HTMLParser):
    """Collects the anchors of a page, and where its links and pictures lead."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors |= {value for name in ("id", "name") if (value := values.get(name))}
        self.links |= {value for name in ("href", "src") if (value := values.get(name))}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if find_spec("mkdocs") is None or find_spec("mkdocstrings") is None:
        missing("MkDocs is not installed (the extra `docs`)", "SITE_TESTS")
    folder = tmp_path_factory.mktemp("site")
    words = (sys.executable, str(ROOT / "scripts/site"), str(folder))
    done = subprocess.run(
        words, env=environment(PROJECT_PYTHON=sys.executable), capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
    return folder


def test_each_link_leads_somewhere(site):
    pages = {file: Page(file) for file in site.rglob("*.html") if file.name != "404.html"}
    assert len(pages) > 30
    for file, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            assert target.exists(), f"{file.relative_to(site)}: {link}"
            if parts.fragment and target in pages and not parts.fragment.startswith("__"):
                assert unquote(parts.fragment) in pages[target].anchors, f"{file.relative_to(site)}: {link}"


def test_the_reference_has_what_the_docstrings_say(site):
    text = (site / "docs/reference.html").read_text()
    for argument in ("global_batch_size", "every_n_steps", "lr_reference_batch", "crop_padding", "tensor_parallel"):
        assert f"<code>{argument}</code>" in text, argument
    assert ":::" not in text


def test_files_and_links_to_code_read_as_on_github(site):
    tutorial = (site / "docs/tutorial.html").read_text()
    assert '<span class="filename">train.py</span>' in tutorial
    assert "```" not in tutorial
