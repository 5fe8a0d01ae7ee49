"""Tables and texts on a terminal of 80 columns: nothing is wider, and no word is cut but where it is longer than a line."""

import io
import json
import sys

import pytest
import yaml
from rich.console import Console
from rich.table import Table

from project.cli import differences, report, runs, same
from project.cli.reading import folded
from project.doctor.findings import Finding, show
from project.errors import Cause
from project.tables import fit_table
from project.watch.history import lives_of
from project.watch.life import _entries
from tests.watch.test_comparison import START, step

NAME = "a-run-with-a-rather-long-name-20261127-015502"


@pytest.fixture
def terminal(tmp_path, monkeypatch, capsys):
    """Two runs, one of which has another learning rate, and a terminal of 80 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    for name, rate in ((NAME, 0.1), (f"{NAME}-2", 0.2)):
        folder = tmp_path / "lightning_logs" / name
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "fingerprints.jsonl").write_text(
            START.line()
            + "".join(step(number, weights=f"{rate}".ljust(16, "0").replace(".", "0")).line(4) for number in (1, 2))
        )
        (folder / "config.yaml").write_text(yaml.safe_dump({"model": {"a_long_key": "word " * 30, "rate": rate}}))
        manifest = {"position": {"global_step": 12345}, "metrics": {"validation/a_long_metric": rate}}
        (folder / "checkpoints/step-000012345.json").write_text(json.dumps(manifest))
        start = {"event": "start", "time": 1.0, "step": 0, "ranks": 64, "of": 100000, "hosts": {"a-long-name-of-a-host": 64}}
        why = "a cause that takes more than a line of a terminal, " * 4
        stop = {"event": "stop", "time": 9.0, "step": 12345, "state": "failed", "why": why}
        (folder / "life.jsonl").write_text(f"{json.dumps(start)}\n{json.dumps(stop)}\n")
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: True, raising=False)

    def lines(text: str) -> list[str]:
        text = text or capsys.readouterr().out
        assert text
        assert max(map(len, text.splitlines())) <= 80, text
        return text.splitlines()

    return lines


def test_verbs_fit_80_columns(terminal):
    runs.main([])
    first = terminal("")
    assert first[0].split()[:2] == ["run", "state"]
    assert "12,345/100,000" in first[1]
    assert NAME in f"{first}"
    same.main([NAME, f"{NAME}-2"])
    assert "HINT" not in terminal("")[0]
    report.main([NAME])
    terminal("")
    differences.main(["diff", NAME, f"{NAME}-2"])
    terminal("")


def test_a_doctors_table_fits_80_columns(terminal):
    out = io.StringIO()
    finding = Finding("gradient sync", "warning", "every link of this host is slow, " * 6, "Look at its cable, and its driver.")
    show([finding], Console(file=out, width=80, force_terminal=True, color_system=None))
    terminal(out.getvalue())
    assert "Look at its cable" in out.getvalue()


def test_of_a_long_cause_the_end_is_kept_too(tmp_path):
    """The exception's own words stand last, after all that it quotes."""
    entries = _entries(Cause(f"RuntimeError: {'x' * 2000} the tensor is empty"))
    start = {"event": "start", "time": 1.0, "step": 0, "ranks": 1}
    stop = {"event": "stop", "time": 2.0, "step": 1, "state": "failed", **entries}
    (tmp_path / "life.jsonl").write_text(f"{json.dumps(start)}\n{json.dumps(stop)}\n")
    (life,) = lives_of(tmp_path / "life.jsonl")
    assert life.why is not None
    assert len(life.why) == 1000
    assert life.why.startswith("RuntimeError: x")
    assert life.why.endswith("x the tensor is empty")


def test_lines_are_folded_between_words():
    assert folded("  starts    " + "word " * 20, 40).splitlines()[1].startswith(" " * 12 + "word")
    assert folded("see /a/path/that/is/longer/than/a/line/of/it", 20) == "see\n  /a/path/that/is/longer/than/a/line/of/it"
    assert folded("word " * 50, None) == "word " * 50


def test_the_least_important_columns_of_a_table_are_left_out():
    table = Table("parameters", "other", "total")
    table.add_row("1 " * 20, "2 " * 10, "3 " * 10)
    out = io.StringIO()
    console = Console(file=out, width=80)
    console.print(fit_table(table, console, ("other", "parameters")))
    assert "other" not in out.getvalue()
    assert "parameters" in out.getvalue()
    assert max(map(len, out.getvalue().splitlines())) <= 80
