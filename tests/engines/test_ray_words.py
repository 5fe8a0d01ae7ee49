"""What the verb `ray` understands, and what follows a start that ended."""

import subprocess
import sys

import pytest

from project.launch.ray.verb import main, read
from tests.conftest import ROOT, environment

DDP = ("fit", "--config", "configs/ddp.yaml")


def test_words_of_ray_and_words_of_the_training(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    options = read([*DDP, "--workers", "3", "--min-workers=2", "--trainer.max_epochs", "4"])
    assert (options.workers, options.min_workers, options.address) == (3, 2, None)
    assert options.name.startswith("ddp-")
    assert options.words == [*DDP, "--trainer.max_epochs", "4", "--run", options.name]
    options = read([*DDP, "--run=it", "--trainer.default_root_dir=elsewhere", "--address=h1:6379"])
    assert options.words == [*DDP, "--run=it", "--trainer.default_root_dir=elsewhere"]
    assert options.folder == tmp_path / "elsewhere/lightning_logs/it"
    assert options.address == "h1:6379"


def test_a_trial_of_a_sweep_is_watched_under_the_name_that_it_has(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    options = read([*DDP, f"--sweep={ROOT}/configs/sweeps/lr.yaml", "--trial=2", "--run=it"])
    assert options.name == "it-2"
    assert options.folder == tmp_path / "lightning_logs/it-2"
    assert options.words[3:5] == ["--run", "it-2"]
    assert "--data.global_batch_size=128" in options.words
    assert not [argument for argument in options.words if argument.startswith(("--sweep", "--trial"))]


def test_where_the_driver_is_does_not_go_to_the_workers(fit, monkeypatch):
    """They may be on other nodes, in other images."""
    for name in ("PROJECT_NODE", "PROJECT_IMAGE", "NCCL_DEBUG"):
        monkeypatch.setenv(name, "said")
    passed = fit.passed_on(300)
    assert passed["NCCL_DEBUG"] == "said"
    assert not {"PROJECT_NODE", "PROJECT_IMAGE"} & passed.keys()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workers=0"], "--workers: a number from 1 on, not 0"),
        (["--workers=2", "--min-workers=3"], "--min-workers 3 is more than --workers 2"),
        (["--tune=sweep.yaml", "--workers=2", "--min-workers=1"], "--min-workers is not for --tune"),
        (["--tune=sweep.yaml", "--sweep=sweep.yaml"], "give one of them"),
        (["--gpus=-1"], "--gpus: a number from 0 on, not -1"),
        (["--max-failures=-2"], "--max-failures: a number from -1 on, not -2"),
    ],
)
def test_words_that_make_no_sense_are_refused(words, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        read([*DDP, *words])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_the_driver_loads_neither_torch_nor_lightning():
    code = (
        "import sys; from project.launch.ray.verb import read; read(['fit', '--config', 'configs/ddp.yaml']);"
        "print(sorted({'torch', 'lightning', 'ray'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_without_ray_it_says_what_to_install(tmp_path):
    """A `ray` that can't be imported stands in its way."""
    (tmp_path / "ray.py").write_text("raise ModuleNotFoundError(\"No module named 'ray'\")\n")
    env = environment(PYTHONPATH=f"{tmp_path}:{ROOT}")
    words = [sys.executable, "-m", "project", "ray", *DDP]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "ERROR   Ray can't be loaded: No module named 'ray'. HINT: pip install \"samerun[ray]\" (which is ray>=2.60)."
    ]


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:9", "There is no connection with the Ray cluster at 127.0.0.1:9: "),
        ("ray://h1", "that is no address of a Ray"),
    ],
)
def test_a_cluster_that_is_not_there_is_said_at_once(address, message):
    words = [sys.executable, "-m", "project", "ray", *DDP, f"--address={address}"]  # a program: it takes all signals
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 2
    assert message in done.stderr


def test_a_search_needs_to_know_what_decides(tmp_path, capsys):
    (tmp_path / "sweep.yaml").write_text("keys: {model.optimizer.init_args.lr: [0.1, 0.2]}")
    assert main([*DDP, f"--tune={tmp_path}/sweep.yaml"]) == 2
    assert "does not say what the trials are compared by" in capsys.readouterr().err


# What follows a start ------------------------------------------------------------------------------------------------


@pytest.fixture
def fit():
    pytest.importorskip("ray")
    from project.launch.ray import fit

    return fit


@pytest.mark.parametrize(
    ("codes", "signals", "code"),
    [
        ((0, 0, 0), (), 0),
        ((143, 143, 143), (), 143),  # somebody stopped it
        ((143, 143), (15,), 143),
        ((), (15,), 143),
        ((130, 130, 75), (), None),
        ((2, 2, 2), (), 2),  # a wrong key is as wrong the next time
        ((75, 75, -9), (), None),
        ((75, 75), (), None),
    ],
)
def test_what_is_no_failure_is_not_tried_again(fit, codes, signals, code):
    start = fit.Start(["h1", "h2", "h3"], dict(enumerate(codes)))
    start.hosts = start.hosts[: len(codes)] or start.hosts
    assert start.end(signals) == code


def test_a_rank_that_was_to_stop_has_not_failed(fit):
    """It may have died of a second signal, Ray's own, when it had saved."""
    ended = fit.Start(["h1", "h2"], moved="h2 is taken away")
    for rank, code in enumerate((143, -15)):
        ended.note_end(rank, code, [])
    assert ended.codes == {0: 143, 1: 143}
    assert "rank 1 on h2 is lost: its node has died" in fit.Start(["h1", "h2"], {0: 75}, {1: "its node has died"}).cause()


def runs(fit, tmp_path, monkeypatch, *starts, failures=3):
    """The exit code of a run whose starts end so, with what it prints of them; the last one again and again."""
    options = read([*DDP, f"--max-failures={failures}", "--run=it", f"--trainer.default_root_dir={tmp_path}"])
    (options.folder / "checkpoints").mkdir(parents=True)
    driver, left = fit.Fit.__new__(fit.Fit), list(starts)
    driver._options, driver._signals = options, []

    def train(group, start):
        ended, saved = left.pop(0) if len(left) > 1 else left[0]
        vars(start).update(vars(ended))
        if saved:
            (options.folder / f"checkpoints/step-{len(left):09d}.ckpt").touch()

    messages = []
    monkeypatch.setattr(driver, "_place", object)
    monkeypatch.setattr(driver, "_train", train)
    monkeypatch.setattr(fit, "remove_placement_group", lambda group: None)
    monkeypatch.setattr(fit, "say", lambda level, text: messages.append(text))
    return driver.run(), messages


def test_after_so_many_failures_the_exit_code_is_the_ranks_own(fit, tmp_path, monkeypatch):
    killed = fit.Start(["h1", "h2"], {0: 75, 1: -9})
    code, messages = runs(fit, tmp_path, monkeypatch, (killed, False), failures=1)
    assert code == 75
    assert messages == [
        "Ray starts the workers again (failure 1 of 1): rank 1 on h2: SIGKILL.",
        "The run is not started again: rank 1 on h2: SIGKILL; so many failures: 2 (--max-failures 1).",
    ]


def test_starts_that_come_to_no_new_checkpoint_come_to_an_end(fit, tmp_path, monkeypatch):
    failed = fit.Start(["h1"], {0: 1})
    code, messages = runs(fit, tmp_path, monkeypatch, (failed, True), (failed, False), failures=-1)
    assert code == 1
    assert len(messages) == 5
    assert "started 3 times and came to no new checkpoint" in messages[-1]


def test_a_rank_gets_the_variables_of_torchrun_and_the_gpus_of_its_host(fit):
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
    alike = fit.layout(["a", "a", "b", "b"], ["0", "1", "0", "1"])
    assert [rank["RANK"] for rank in alike] == ["0", "1", "2", "3"]
    assert [alike[2][name] for name in names] == ["0", "2", "1", "2", "0,1"]
    odd = fit.layout(["a", "a", "b"], ["0", "1", "0"])
    assert [odd[1][name] for name in names] == ["0", "1", "1", "3", "1"]
    assert "CUDA_VISIBLE_DEVICES" not in fit.layout(["a"], [""])[0]


def test_of_the_trials_that_came_as_far_one_in_three_continues():
    pytest.importorskip("ray")
    from project.launch.ray.search import _lags

    rungs: dict[int, list[float]] = {}
    assert [_lags(rungs, (1, 3), 1, loss) for loss in (1.0, 0.5, 2.0, 0.4)] == [False, False, True, False]
    assert not _lags(rungs, (1, 3), 2, 9.0)  # rungs are after 1, 3, 9, ... validations
    assert [_lags(rungs, (1, 3), 3, loss) for loss in (1.0, 2.0)] == [False, True]
    assert not _lags(rungs, None, 1, 9.0)
