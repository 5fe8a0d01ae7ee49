"""The README's examples run as they stand there, and what it names exists."""

import re

import pytest

from tests.conftest import ROOT

README = (ROOT / "README.md").read_text()
FILES = dict(re.findall(r"```\w+ (\S+)\n(.*?)```", README, re.DOTALL))


@pytest.mark.parametrize("name", ["mynet", "mydata"])
def test_an_example_runs(cli, tmp_path, name):
    for file, text in FILES.items():
        (tmp_path / file).write_text(text)
    command = f"python -m project fit --config {name}.yaml"
    assert command in README
    run = cli(*command.split()[3:], "--trainer.max_steps=2", "--trainer.limit_val_batches=1", "--trainer.devices=2")
    assert run.code == 0, run.output
    assert "global batch 128" in run.output


def test_it_lists_every_config():
    assert set(re.findall(r"^\| `(\w+\.yaml)`", README, re.MULTILINE)) == {p.name for p in (ROOT / "configs").glob("*")}


def test_what_it_links_to_exists():
    for text in (README, (ROOT / "docs/ddp.md").read_text()):
        for place in re.findall(r"\]\(([\w./]+)\)|`((?:data|model|watch|survive|cluster)/\w+\.py)`", text):
            target = ROOT / place[0] if place[0] else ROOT / "project" / place[1]
            assert target.exists(), target
