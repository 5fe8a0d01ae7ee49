"""Nothing that lies in a run's folder ends or hangs a verb or a training, leads out of it, or gets into a report."""

import json
import shutil
import signal
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event

from project.cli.profiling import FOLDER
from project.cli.profiling import _tables as tables
from project.watch.curves import ASIDE, Curves
from tests.conftest import _SERVER, TINY, forked
from tests.hostile import LIMIT, SECRET, Case, Ended, cases, drive, framed, harm

CSV = json.dumps([{"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "."}}])
FIT = (
    *("fit", "--config=configs/ddp.yaml", *TINY, "--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.max_steps=4"),
    *("--checkpoints.every_n_steps=2", "--data.batch_size=16", "--data.global_batch_size=32", f"--trainer.logger={CSV}"),
)
READERS = (("report", "it"), ("same", "it", "other"), ("watch", "it", "--once"), ("profile", "it"))
WEIGHTS = (("validate", "--run=it"), ("export", "--run=it", "--to=safetensors"))
TRAIN = ("fit", "--run=it", "--trainer.max_steps=5")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two runs that are alike."""
    place = tmp_path_factory.mktemp("runs")
    for name in ("it", "other"):
        run = forked(place, *FIT, f"--run={name}")
        assert run.code == 0, run.output
    return place


def seen(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(path): (path.lstat().st_mtime_ns, path.read_bytes()) for path in sorted(folder.rglob("*")) if path.is_file()}


def verbs_over(place: Path, tmp_path: Path, chosen: list[Case], every: int = 1) -> list[Ended]:
    """Copies the runs for each case, does it, and runs the verbs there; those that train for one case in so many."""
    outside, jobs = tmp_path / "outside", []
    outside.mkdir()
    (outside / "secret.txt").write_text(f"2026-01-01 10:00:00,000 ERROR {SECRET}\n")
    (outside / "config.yaml").write_text(f"# {SECRET}\ntrainer: {{max_steps: 1}}\n")
    before = seen(outside)
    for number, case in enumerate(chosen):
        folder = tmp_path / f"case-{number}"
        shutil.copytree(place / "lightning_logs", folder / "lightning_logs")
        harm(folder / "lightning_logs/it", case, outside)
        verbs = [*READERS]
        if case.file != "config.yaml" or case.way not in ("another value", "cut", "an empty file", "lines of nothing"):
            if number % every == 0:
                verbs += [*(WEIGHTS if case.file in ("config.yaml", "manifest", "checkpoint", "checkpoints") else ()), TRAIN]
            verbs += [("prove", "--run=it")] if case.file == "config.yaml" else []
        jobs += [(str(case), folder, words) for words in verbs]
    results = tmp_path / "results.jsonl"
    process = _SERVER.Process(target=drive, args=(jobs, results))
    process.start()
    process.join()
    assert seen(outside) == before
    for page in tmp_path.glob("case-*/**/*"):
        if page.suffix in (".html", ".json", ".csv", ".yaml") and page.is_file() and not page.is_symlink():
            assert SECRET not in page.read_text(errors="replace"), page
    outcomes = [Ended(case, tuple(words), *rest) for case, words, *rest in map(json.loads, results.read_text().splitlines())]
    assert len(outcomes) == len(jobs)
    return outcomes


def problem(ended: Ended) -> str:
    if ended.code in (-signal.SIGALRM, -signal.SIGXCPU):
        return f"takes more than {LIMIT} s"
    if ended.code < 0:
        return f"is killed by signal {-ended.code}"
    if "Traceback" in ended.output:
        return "gives a traceback"
    if SECRET in ended.output:
        return "prints what lies outside"
    if "\x1b" in ended.output:
        return "sends control characters"
    return "" if ended.code in (0, 1, 2) else f"ends with {ended.code}"


def check(outcomes: list[Ended]) -> None:
    wrong = [
        f"{outcome.case}: {' '.join(outcome.words)} {why}\n{outcome.output[-3000:]}"
        for outcome in outcomes
        if (why := problem(outcome))
    ]
    assert not wrong, f"{len(wrong)} of {len(outcomes)}:\n" + "\n\n".join(wrong)


def test_verbs_over_hostile_folders(place, tmp_path):
    check(verbs_over(place, tmp_path, cases(20), every=10))


@pytest.mark.faults
def test_verbs_over_200_hostile_folders(place, tmp_path):
    check(verbs_over(place, tmp_path, cases(200)))


def test_events_are_read_as_tensorboard_reads_them_and_what_is_damaged_is_left_out(place, tmp_path):
    """Also in pieces, while they are written."""
    (file,) = (place / "lightning_logs/it").glob("events.*")
    whole, path = file.read_bytes(), tmp_path / file.name
    accumulator = EventAccumulator(str(file)).Reload()
    expected = {
        tag.removeprefix(ASIDE): [(event.step, event.value, event.wall_time) for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }
    curves = Curves(tmp_path)
    assert curves.read() == {}
    for end in (5, 300, 3000, len(whole)):
        path.write_bytes(whole[:end])
        tags = curves.read()
    with path.open("ab") as opened:
        for record in (b"\xff" * 30, Event(step=1, wall_time=1e300).SerializeToString(), Event(step=-5).SerializeToString()):
            opened.write(framed(record))
        opened.write(framed(b"", 1 << 62))
    assert curves.read() == expected
    assert sorted(tags) == sorted(expected)


def test_a_table_of_a_profile_is_a_file_of_the_folder(tmp_path):
    folder = tmp_path / FOLDER
    folder.mkdir()
    (folder / "step-000000001-rank0.txt").write_text("a table")
    (folder / "step-000000001-rank1.txt").symlink_to("nowhere")
    for name in ("step-1-rankx.txt", "step-000000001-memory-rank0.txt", "step-000000001-rank9999999999999.txt"):
        (folder / name).touch()
    assert tables(tmp_path).keys() == {"step-000000001-rank0.txt"}


@pytest.mark.parametrize("steps", [6, pytest.param(25, marks=pytest.mark.faults)])
def test_a_training_whose_folder_is_made_hostile_has_the_bits_of_another(quick, tmp_path, steps):
    """Eight cases before each step: pipes where it logs and saves, links, folders, requests for profiles."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret.txt").write_text(SECRET)
    before = seen(tmp_path / "outside")
    for name, often in (("quiet", 0), ("hostile", steps)):
        vandal = json.dumps([{"class_path": "tests.vandal.Vandal", "init_args": {"steps": often}}])
        words = (*FIT, f"--run={name}", f"--trainer.callbacks={vandal}", "--trainer.val_check_interval=3")
        run = quick(*words, f"--trainer.max_steps={steps}", "--trainer.max_epochs=-1", timeout=120)
        assert run.code == 0 or (often and "The run is over, and its last checkpoint" in run.output), run.output
        assert "Traceback" not in run.output, run.output
        assert SECRET not in run.output
    weights = [(tmp_path / f"weights-{often}.txt").read_text() for often in (0, steps)]
    assert weights[0] == weights[1]
    assert seen(tmp_path / "outside") == before
