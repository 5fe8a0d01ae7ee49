"""Configs and files of a run's folder that are damaged or hostile: a line that says so, in no time."""

import io
import logging
import os
import random

import pytest
from rich.console import Console

from project.checkpoints.writing import write_file
from project.config_files import documents, expand
from project.doctor.findings import Finding, show
from project.errors import UserError
from project.untrusted import open_to_append, parse_yaml, printable, read_json, write_text
from project.watch.console import _Formatter
from tests.conftest import ROOT

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)
MALFORMED = {
    "a bomb of aliases": LAUGHS,
    "a list in itself": "a: &a [*a]",
    "a mapping in itself": "a: &a {b: {c: *a}}",
    "a merge of itself": "a: &a\n  <<: *a",
    "two thousand brackets": "a: " + "[" * 2000 + "]" * 2000,
    "many mappings": "a: " + "{b: " * 5000 + "1" + "}" * 5000,
    "UTF-16": "trainer: {}".encode("utf-16"),
    "no text": b"\xff\xfe\x00\xd8",
    "a control character": "a: \x07",
    "a huge integer": "a: " + "9" * 5000,
    "a base that is a number": "base: 3",
    "a base that is a list of mappings": "base: [{a: 1}]",
    "a list": "[1, 2]",
    "a number": "3",
    "a date for a key": "2020-01-01: 1",
    "an odd date": "trainer: {max_epochs: 2020-13-45}",
    "a tag": "a: !!python/object/apply:os.system ['touch ran']",
    "two documents": "a: 1\n---\nb: 2",
    "a tab": "a:\n\t- b",
    "a key that stands twice": "a: {c: 1}\nb: {c: 1, d: 2, c: 3}",
    "an unknown alias": "a: *b",
}


def read(path):
    return documents(expand(["fit", "--config", str(path)]))


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_config_is_an_error_that_names_it(tmp_path, name):
    path, content = tmp_path / "mine.yaml", MALFORMED[name]
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=r"mine\.yaml"):
        read(path)


def test_a_key_that_stands_twice_is_named_with_its_line(tmp_path):
    (tmp_path / "mine.yaml").write_text("trainer:\n  max_epochs: 1\n  threads: 1\n  max_epochs: 2\n")
    with pytest.raises(UserError, match=r"mine\.yaml, line 4, column 3: .*: the key max_epochs is there twice"):
        read(tmp_path / "mine.yaml")


@pytest.mark.parametrize("content", ["", "# a: 1\n", "{}"])
def test_an_empty_config_is_without_keys(tmp_path, content):
    (tmp_path / "empty.yaml").write_text(content)
    (tmp_path / "mine.yaml").write_text("base: empty.yaml\na: 1")
    assert read(tmp_path / "empty.yaml") == []
    assert read(tmp_path / "mine.yaml") == [{"base": "empty.yaml", "a": 1}]


def test_aliases_of_a_reasonable_document_are_read():
    assert parse_yaml("a: &a {x: [1, 2]}\nb: *a\nc:\n  <<: *a\n  y: 3") == {
        "a": {"x": [1, 2]},
        "b": {"x": [1, 2]},
        "c": {"x": [1, 2], "y": 3},
    }


def test_mutated_configs_are_read_or_refused(tmp_path):
    """A config with bytes changed, cut, doubled or swapped."""
    original, chance = (ROOT / "configs/gpt.yaml").read_bytes(), random.Random(0)
    path = tmp_path / "mine.yaml"
    refused = 0
    for _ in range(500):
        content = bytearray(original)
        for _ in range(chance.choice([1, 3, 30])):
            at, until = sorted(chance.randrange(len(content)) for _ in range(2))
            kind = chance.randrange(4)
            if kind == 0:
                content[at] = chance.randrange(256)
            elif kind == 1:
                del content[at : min(until, at + 20)]
            elif kind == 2:
                content[at:at] = chance.choice(
                    [b"[", b"{", b"*a ", b"&a ", b"- ", b": ", b"!!binary ", b"\n", b"%", b"|", b"2020-01-01"]
                )
            else:
                content[at:at] = content[at : min(until, at + 50)]
        path.write_bytes(content)
        try:
            read(path)
        except UserError:  # and nothing else
            refused += 1
    assert 100 < refused < 500


def test_json_that_is_none_is_a_value_error(tmp_path):
    path = tmp_path / "file.json"
    for content in (b"[" * 100_000, b"\xff\xff", b"", b"[]", b"null", b"{", b"1" * 5000):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"JSON|nested|decode|Expect|digits"):
            read_json(path)


def test_nothing_is_written_through_a_link(tmp_path):
    """Somebody who may write into a run's folder must not get a file elsewhere changed by who looks at the run."""
    victim, folder = tmp_path / "victim", tmp_path / "run"
    victim.write_text("precious")
    folder.mkdir()
    for name in ("file", "file.part", ".file.part", ".file.tmp"):
        (folder / name).symlink_to(victim)
    write_text(folder / "file", "new")
    assert not (folder / "file").is_symlink()
    (folder / "life").symlink_to(victim)
    with pytest.raises(OSError, match="life"):
        open_to_append(folder / "life")
    os.mkfifo(folder / "pipe")
    with pytest.raises(OSError, match="pipe"):
        open_to_append(folder / "pipe")
    write_file(folder / "file", lambda file: file.write(b"checkpoint"))
    assert victim.read_text() == "precious"
    assert (folder / "file").read_bytes() == b"checkpoint"


def test_what_others_say_does_nothing_to_a_terminal():
    hostile = "h1\x1b]0;owned\x07\x1b[2J \u202egnirts\r\n[red]x[/red]"
    assert printable(hostile) == "h1\\x1b]0;owned\\x07\\x1b[2J \\x202egnirts\\x0d\n[red]x[/red]"
    assert printable("x" * 50 + "end", 20) == "xxxxxxxxxxxx ... end"
    record = logging.LogRecord("project.x", logging.INFO, "", 0, "%s", (hostile,), None)
    record.who = ""
    assert "\x1b" not in _Formatter().format(record)
    shown = io.StringIO()
    show([Finding("hosts", "good", hostile, "[/]", [], {})], Console(file=shown, width=200))
    assert "[red]x[/red]" in shown.getvalue()
    assert "\x1b" not in shown.getvalue()
