"""What needs no training: `--help`, the completion, the schema of the YAML and differences between configurations."""

import json
import os
import re
import subprocess
import sys

import jsonschema
import pytest
import yaml

from project.__main__ import _ENGINES, _READERS
from project.cli import differences
from project.cli.completion import completions
from project.cli.keys import FILE, choices, document
from project.cli.project_cli import ProjectCLI
from project.cli.verbs import VERBS
from tests.conftest import ROOT, environment

LIGHT = """
import sys
sys.stderr = sys.stdout
sys.argv[1:] = {words}
from project.__main__ import main
try:
    main()
except SystemExit as end:
    print("code", end.code)
print("heavy", sorted({{"torch", "lightning", "jsonargparse"}} & sys.modules.keys()))
"""


def lightly(folder, *words: str) -> str:
    """What the program prints, which must come to its end without the libraries that take seconds to load."""
    command = [sys.executable, "-c", LIGHT.format(words=list(words))]
    done = subprocess.run(command, cwd=folder, env=environment(COLUMNS="200"), capture_output=True, text=True, timeout=300)
    output, _, heavy = done.stdout.rpartition("heavy ")
    assert heavy == "[]\n", done
    return output


def test_help_shows_all_verbs_and_loads_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["project"])
    assert VERBS.keys() == ProjectCLI.subcommands().keys() | _READERS.keys() | _ENGINES.keys() | {"bench"}
    shown = lightly(tmp_path, "--help")
    assert re.findall(r"^  (\w+)  ", shown, re.MULTILINE) == list(VERBS)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("fti", "--config=x"), "There is no verb 'fti'. Did you mean fit? Choose from fit, "),
        ((), "No verb is given. Choose from fit, "),
    ],
)
def test_a_verb_that_there_is_not_is_refused_and_nothing_is_loaded(tmp_path, words, text):
    shown = lightly(tmp_path, *words)
    assert shown.startswith(f"ERROR   {text}")
    assert shown.endswith(", bench. HINT: python -m project --help\ncode 2\n")


@pytest.mark.parametrize("verb", ["fit", "test", "export"])
def test_the_help_of_a_verb_is_what_its_parser_would_print(quick, tmp_path, verb):
    assert lightly(tmp_path, verb, "--help") == quick(verb, "--help").output + "code 0\n"


@pytest.fixture
def samerun(tmp_path):
    """The environment of a shell that knows the command samerun."""
    program = tmp_path / "bin/samerun"
    program.parent.mkdir()
    body = "from project.__main__ import console; console()"  # by a shell, as pip does: Python's path may have a space
    program.write_text(f"#!/bin/sh\nexec '{sys.executable}' -c '{body}' \"$@\"\n")
    program.chmod(0o755)
    return environment(PATH=f"{program.parent}:{os.environ['PATH']}")


def test_the_command_samerun_is_the_program(samerun, tmp_path):
    (tmp_path / "own.py").write_text("from project.model import MiniResNet\nclass Net(MiniResNet): pass\n")
    words = ("samerun", "fit", "--config=configs/ddp.yaml", "--model.network=own.Net", "--print_config")
    done = subprocess.run(words, cwd=tmp_path, env=samerun, capture_output=True, text=True, timeout=300)
    assert "class_path: own.Net" in done.stdout, done.stderr  # a module in the working directory


LINES = {
    "samerun comp": ["completion"],
    "samerun fit --tr": ["--trainer."],
    "samerun fit --trainer.max_e": ["--trainer.max_epochs"],
    "samerun fit --trainer.nonfinite ": ["skip", "stop"],
    "samerun fit --trainer.nonfinite=sk": ["skip"],
    "samerun fit --trainer.logger w": ["wandb"],
    "samerun fit --data.source Cif": ["Cifar"],
    "samerun fit --data.source Cifar --data.source.init_args.down": ["--data.source.init_args.download"],
    "samerun fit --model.network.init_args.wid": ["--model.network.init_args.widths"],
    "samerun fit --run w": ["wide"],
    "samerun report wide ": ["deep", "wide"],
    "samerun export --to ": ["checkpoint", "onnx", "safetensors", "torch-export"],
    "samerun fit --config conf": [],  # files are the shell's
    "samerun fit --no.such.key": [],
    "samerun nothing --tr": [],
}


@pytest.mark.parametrize("line", LINES)
def test_a_line_is_completed(monkeypatch, tmp_path, line):
    for run in ("wide", "deep", ".hidden"):
        (tmp_path / "lightning_logs" / run).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert completions(line) == LINES[line] or sorted(completions(line)) == LINES[line]


def test_bash_completes_and_loads_nothing(samerun, tmp_path):
    script = """
    source <(samerun completion bash)
    for COMP_LINE in "samerun fit --trainer.max_e" "samerun fit --trainer.nonfinite=st"; do
      COMP_POINT=${#COMP_LINE}; _samerun; echo "${COMPREPLY[@]}"
    done
    """
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=samerun, capture_output=True, text=True, timeout=300)
    assert done.stdout == "--trainer.max_epochs\nstop\n", done.stderr
    assert "--trainer.max_epochs" in lightly(tmp_path, "completion", "words", "samerun fit --trainer.max_e")


def test_the_schema_is_that_of_this_version(quick):
    made = quick("schema", program="project.__main__:main")
    assert (ROOT / "configs" / FILE).read_text() == made.output, f"HINT: python -m project schema > configs/{FILE}"


@pytest.fixture(scope="module")
def schema():
    return jsonschema.Draft202012Validator(json.loads((ROOT / "configs" / FILE).read_text()))


def test_each_config_is_as_its_schema_says(schema):
    for config in (ROOT / "configs").glob("*.yaml"):
        assert config.read_text().startswith(f"# yaml-language-server: $schema={FILE}\n")
        schema.validate(yaml.safe_load(config.read_text()))


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("trainer: {max_epochs: 1, logger: [wandb, csv]}", True),
        ("trainer: {max_epoch: 1}", False),
        ("trainer: {max_epochs: many}", False),
        ("trainer: {logger: wand}", True),  # a string may name a class
        ("model: {network: {class_path: mynet.Net, init_args: {width: 3}}}", True),
        ("model: {class_path: mymodule.Points, init_args: {lr: 3}}", True),
        ("model: {network: {class_path: project.model.MiniResNet, init_args: {wdths: [8]}}}", False),
        ("data: {batch_size: 16, sauce: 3}", False),
        ("notify: {webhook: HOOK, occasions: [lost]}", True),
        ("notify: {occasions: [sometimes]}", False),
        ("traner: {}", False),
    ],
)
def test_the_schema_finds_a_wrong_key_and_takes_a_class_of_the_users(schema, text, fits):
    errors = list(schema.iter_errors(yaml.safe_load(text)))
    assert (not errors) is fits, errors


def test_the_defaults_of_the_schema_are_those_of_a_run(quick, tmp_path):
    """What `config diff` fills in is what the program would: there is no difference to the complete configuration."""
    for name in ("ddp", "gpt"):  # of classes that the schema does not know, as torchvision's, no defaults are known
        complete = quick("fit", f"--config=configs/{name}.yaml", "--print_config")
        (tmp_path / f"{name}.yaml").write_text(complete.output)
        shown = lightly(tmp_path, "config", "diff", f"configs/{name}.yaml", f"{name}.yaml")
        assert shown == f"configs/{name}.yaml and {name}.yaml say the same.\ncode 0\n"


def test_what_differs_is_shown(tmp_path):
    (tmp_path / "a.yaml").write_text("base: configs/ddp.yaml\n")
    (tmp_path / "b.yaml").write_text("base: a.yaml\ntrainer: {max_epochs: 7}\nmodel: {optimizer: {init_args: {lr: 1e-3}}}\n")
    folder = tmp_path / "lightning_logs/it"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("base: ../../b.yaml\nwatchdog: {at_least: 60}\n")
    shown = lightly(tmp_path, "config", "diff", "a.yaml", "b.yaml").splitlines()
    changes = {"model.optimizer.init_args.lr": "0.001", "trainer.max_epochs": "7"}
    assert {line.partition(": ")[0]: line.partition(" -> ")[2] for line in shown[:-1]} == changes
    assert shown[-1] == "code 1"
    assert lightly(tmp_path, "config", "diff", "b.yaml", "it").endswith("say the same.\ncode 0\n")
    done = subprocess.run(
        [sys.executable, "-m", "project", "config", "diff", "a.yaml", "nothing"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("ERROR   There is no run nothing. HINT: ")


def test_a_class_that_is_another_takes_the_arguments_that_it_knows():
    first = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1, "nesterov": True}}
    above = {"model": {"optimizer": {"class_path": "torch.optim.AdamW"}}}
    merged = differences._merged({"model": {"optimizer": first}}, above, document())
    assert merged["model"]["optimizer"]["init_args"] == {"lr": 0.1}
    assert choices(document()["properties"]["trainer"]["properties"]["nonfinite"]) == ["stop", "skip"]
    assert json.dumps(document())


@pytest.mark.parametrize("verb", ["completion bash", "fit --help", "fit --config=configs/ddp.yaml --print_config"])
def test_a_reader_that_has_gone_is_no_error_and_a_full_disk_is_one(tmp_path, verb):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    words = [sys.executable, "-m", "project", *verb.split()]
    reader, pipe = os.pipe()
    os.close(reader)
    with open("/dev/full", "wb") as full, open(pipe, "wb") as gone:
        ends = [
            subprocess.run(words, cwd=tmp_path, env=environment(), stdout=out, stderr=-1, text=True) for out in (full, gone)
        ]
    assert [end.returncode for end in ends] == [2, 0]
    assert [end.stderr for end in ends] == ["ERROR   [Errno 28] No space left on device\n", ""]
