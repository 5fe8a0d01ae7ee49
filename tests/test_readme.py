"""The README and the pages of docs/: their examples run as they stand there, and what they name exists."""

import ast
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from project.cli.verbs import VERBS
from project.errors import TRY_AGAIN
from project.survive.signals import EXIT_CODES
from tests.conftest import PATIENCE, ROOT, TINY, environment
from tests.survive.test_resume import faults

FILES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/howto").glob("*.md")))
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in FILES}
FEW = ("--trainer.max_steps=2", "--trainer.limit_val_batches=1")
SMALL = tuple(argument for argument in TINY if "network" not in argument and "precision" not in argument)


def written(page: str, folder: Path) -> None:
    """The files of a page's examples: blocks whose first line has a name, as in ```yaml mynet.yaml."""
    for file, text in re.findall(r"```\w+ (\S+)\n(.*?)```", PAGES[page], re.DOTALL):
        (folder / file).write_text(text)


def words(page: str, command: str) -> list[str]:
    """A command that stands on a page, without what starts Python."""
    assert re.search(rf"^{re.escape(command)}(\s+#.*)?$", PAGES[page], re.MULTILINE), f"{page} has no line: {command}"
    return command.partition("-m project ")[2].removeprefix("-- ").split()


@pytest.mark.parametrize("name", ["mynet", pytest.param("mydata", marks=pytest.mark.slow)])
def test_an_example_with_a_network_or_images_runs(quick, tmp_path, name):
    written("docs/own.md", tmp_path)
    run = quick(*words("docs/own.md", f"python -m project fit --config {name}.yaml"), *FEW, ranks=2)
    assert run.code == 0, run.output
    assert "global batch 128" in run.output


@pytest.mark.slow
def test_the_example_with_a_lightning_module_runs(quick, tmp_path):
    written("docs/own.md", tmp_path)
    run = quick(*words("docs/own.md", "python -m project fit --config points.yaml --run points"), ranks=2)
    assert run.code == 0, run.output
    assert "micro-batch 16 x accumulation 2 = global batch 64" in run.output
    assert "Lightning's own loop" not in run.output
    best = quick("validate", "--run=points")
    assert "python -m project validate --run points" in PAGES["docs/own.md"]
    assert "the best by val_loss" in best.output, best.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "file", "last"),
    [("docs/own.md", "first.py", 16), ("docs/own.md", "train_points.py", 32), ("docs/own.md", "train_best.py", 32)],
)
def test_an_example_in_python_runs(tmp_path, page, file, last):
    written(page, tmp_path)
    done = subprocess.run(
        [sys.executable, file], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert [path.stem for path in tmp_path.glob(f"runs/*/checkpoints/*{last}.ckpt")] == [f"step-{last:09d}"]


@pytest.mark.parametrize(
    ("page", "command", "batch"),
    [
        ("README.md", "python -m project fit --config mine.yaml", 128),
        ("docs/keys.md", "python -m project fit --config wide.yaml", 64),
        pytest.param("docs/keys.md", "python -m project fit --config logged.yaml --run logged", 128, marks=pytest.mark.slow),
    ],
)
def test_an_example_config_runs(quick, tmp_path, page, command, batch):
    written(page, tmp_path)
    # As large as in the config: of images of one pixel, a CPU's bf16 gradients are garbage (docs/dev/upstream.md).
    run = quick(*words(page, command), *FEW, *SMALL, "--data.source.init_args.image_size=32")
    assert run.code == 0, run.output
    assert f"global batch {batch}" in run.output


def test_the_module_of_the_readme_trains_and_resumes_on_three_ranks(cli, tmp_path):
    written("README.md", tmp_path)
    line = "python -m project fit --model sums.Sums --trainer.global_batch_size 96 --trainer.max_epochs 3 --run sums"
    stopped = cli(*words("README.md", line), "--trainer.max_steps=13")
    assert stopped.code == 0, stopped.output
    resumed = cli(*words("README.md", line), "--trainer.devices=3", "--trainer.max_steps=-1")
    assert resumed.code == 0, resumed.output
    assert "1 host x 3 processes x micro-batch 16 x accumulation 2 = global batch 96" in resumed.output
    assert "step-000000013.ckpt" in resumed.output
    assert "17 steps, 1,632 samples in " in resumed.output  # of thirty


def test_a_run_is_stopped_and_goes_on_as_the_page_about_signals_says(quick):
    page = "docs/signals.md"
    command = words(page, "python -m project fit --config configs/ddp.yaml --run nightly")
    stop = (*TINY, "--trainer.max_epochs=3", faults({"step": 4, "number": int(signal.SIGTERM)}))
    stopped, resumed = quick(*command, *stop), quick(*command, *stop)
    assert (stopped.code, resumed.code) == (143, 0), resumed.output
    shown = [line.split("INFO    ")[1] for line in PAGES[page].splitlines() if " INFO " in line]
    for line, run in zip(shown, (stopped, stopped, resumed), strict=True):
        place = str(run.folder / "lightning_logs")
        output = run.output.replace(place, ".../lightning_logs").replace("epoch 3, step 0", "epoch 1, step 4")
        assert line in output, run.output


@pytest.mark.parametrize("page", [page for page in PAGES if " INFO  " in PAGES[page]])
def test_the_lines_of_a_log_have_dates_as_the_program_prints_them(page):
    lines = [line for line in PAGES[page].splitlines() if " INFO  " in line]
    assert [line for line in lines if not re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO    ", line)] == []


@pytest.mark.slow
def test_torchrun_starts_what_the_page_about_machines_says(cli):
    command = "torchrun --standalone --nproc-per-node 2 -m project -- fit --config configs/ddp.yaml --run pair"
    run = cli(*words("docs/machines.md", command), *TINY, *FEW, torchrun=2)
    assert run.code == 0, run.output
    assert "1 host x 2 processes" in run.output


def test_an_error_reads_as_the_page_about_messages_says(quick):
    page = "docs/messages.md"
    run = quick(*words(page, "python -m project fit --config configs/ddp.yaml --trainer.devices 3"), ranks=3)
    assert run.code == 2
    (line,) = re.findall(r"^3 rank\(s\).*$", PAGES[page], re.MULTILINE)
    assert line in run.output


def texts(node: ast.AST) -> str:
    """All strings of a file; what is computed within them becomes a gap."""
    strings = []
    for child in ast.walk(node):
        if isinstance(child, ast.JoinedStr):
            strings.append("".join(part.value if isinstance(part, ast.Constant) else "\0" for part in child.values))
        elif isinstance(child, ast.Constant) and isinstance(child.value, str):
            strings.append(re.sub(r"%(\.\w+)?[sdfg]", "\0", child.value))
    return "\n".join(strings)


def test_each_message_is_one_that_the_code_has():
    messages = "\n".join(texts(ast.parse(path.read_text())) for path in (ROOT / "project").rglob("*.py"))
    rows = re.findall(r"^\| `(.+?)` \|", PAGES["docs/messages.md"], re.MULTILINE)
    assert len(rows) > 5
    for row in rows:
        for part in re.split(r"\.\.\.|\bh\d\b|\b\d+\b|\bN\b", row):
            plain = part.strip(" ,:").split(" ")
            # One of its words may be computed, too, and its plural.
            gaps = [" ".join([*plain[:at], gap, *plain[at + 1 :]]) for at in range(len(plain)) for gap in ("\0", "\0s")]
            ways = [" ".join(plain), *gaps]
            if len(plain) > 1:
                assert any(way in messages for way in ways), f"{row}: nothing says {part!r}"


def test_the_defaults_on_the_page_about_keys_are_the_codes(quick):
    config = yaml.safe_load(quick("fit", "--print_config").output)
    rows = re.findall(r"^\| ((?:`[\w.-]+`(?:, )?)+) \| ([^|]+) \| [^|]+ \|$", PAGES["docs/keys.md"], re.MULTILINE)
    checked = 0
    for keys, defaults in rows:
        for key, default in zip(re.findall(r"`([\w.-]+)`", keys), re.sub(r" \(.*?\)", "", defaults).split(", "), strict=False):
            value = config
            for part in key.removeprefix("--").split("."):
                value = value[part]
            expected = yaml.safe_load(default.strip("` "))
            assert value == (None if expected == "none" and key.startswith("checkpoints") else expected), key
            checked += 1
    assert checked > 15


def test_exit_codes_are_those_of_the_page_about_signals():
    (row,) = re.findall(r"^\| Ctrl-C .*\| (.*) \|$", PAGES["docs/signals.md"], re.MULTILINE)
    names = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    assert [int(code) for code in row.split(", ")] == [EXIT_CODES[name] for name in names]
    assert f"| {TRY_AGAIN} |" in PAGES["docs/signals.md"]


def test_the_environment_on_the_page_about_machines_is_what_the_script_reads():
    script = (ROOT / "scripts/launch.sh").read_text()
    (table,) = re.findall(r"\| environment \|.*?\n\n", PAGES["docs/machines.md"], re.DOTALL)
    names = re.findall(r"`([A-Z_]+)`", "\n".join(row.split("|")[1] for row in table.splitlines() if row))
    assert names
    assert all(name in script for name in names)
    described = re.findall(r"^# ([A-Z_]{5,}) ", script, re.MULTILINE)
    assert set(described) <= set(names)


def test_the_page_about_keys_has_all_verbs():
    assert [verb for verb in VERBS if not re.search(rf"(project|samerun) {verb}\b", PAGES["docs/keys.md"])] == []


def test_all_configs_are_listed():
    rows = re.findall(r"^\| (`\w+\.yaml`.*?) \|", PAGES["docs/keys.md"], re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`(\w+\.yaml)`", row)]
    assert set(listed) == {path.name for path in (ROOT / "configs").glob("*.yaml")}


MAINTAINERS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs/dev").glob("*.md"))
ROOMS = "|".join(path.parent.name for path in (ROOT / "project").glob("*/__init__.py"))


@pytest.mark.parametrize("page", [*PAGES, *MAINTAINERS, "CONTRIBUTING.md", "BENCHMARKS.md", "CHANGELOG.md"])
def test_what_a_page_links_to_exists(page):
    text = (ROOT / page).read_text()
    for place, anchor in re.findall(r"\]\(([\w./-]*)(#[\w-]+)?\)", text):
        target = (ROOT / page).parent / place if place else ROOT / page
        assert target.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert anchor[1:] in {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}, anchor
    for place in re.findall(rf"`(?:project/)?((?:{ROOMS})/[\w/]+\.py)`", text if page != "CHANGELOG.md" else ""):
        assert (ROOT / "project" / place).exists(), place


@pytest.mark.parametrize("page", [*PAGES, "BENCHMARKS.md", "CHANGELOG.md"])
def test_users_are_sent_to_no_page_for_maintainers(page):
    assert re.findall(r"\]\((?:docs/|\.\./)*dev/", (ROOT / page).read_text()) == []


def test_every_page_is_linked_from_the_readme():
    assert all(f"]({page})" in PAGES["README.md"] for page in PAGES if page != "README.md")


@pytest.mark.parametrize("page", ["README.md", "docs/faults.md"])
def test_the_tests_that_a_page_names_exist(page):
    named = re.findall(r"`((?:\w+/)*test_\w+\.py)(?:::(\w+))?", PAGES[page])
    assert named
    for file, start in named:
        (path,) = [test for test in ROOT.glob("tests/**/*.py") if test.as_posix().endswith(f"/{file}")]
        assert f"def {start}" in path.read_text(), f"{file}::{start}"


def test_the_readme_is_read_in_three_minutes():
    assert len(PAGES["README.md"].splitlines()) <= 110
