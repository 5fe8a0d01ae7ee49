"""Profiles: of steps that the YAML names, and of a run that goes on, at a word; in real runs, and unseen by their results."""

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import DeviceType

from project.cli import same
from project.model import MiniResNet
from project.watch.asked import FILE, Asked
from project.watch.profile import Profile
from project.watch.recorded import RANGE, lines
from tests.cluster.machine import wait_until
from tests.conftest import TINY, environment
from tests.own import write_texts

DDP = "--config=configs/ddp.yaml"
GPT = ("--config=configs/gpt.yaml", "--data.init_args.text=texts/*.txt", "--trainer.global_batch_size=32")


def traced(file: Path) -> set[str]:
    """The names in a trace."""
    with gzip.open(file, "rt") as trace:
        return {event["name"] for event in json.load(trace)["traceEvents"] if "name" in event}


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "profiles").iterdir())


@pytest.mark.slow
def test_steps_that_the_yaml_names_on_three_ranks_and_the_run_is_the_same(cli, quick, tmp_path):
    wanted = ("--profile.step=4", "--profile.steps=2", "--profile.ranks=[0,2]", "--profile.memory=true")
    words = ("fit", DDP, *TINY, "--data.batch_size=4", "--data.global_batch_size=24", "--trainer.max_steps=8")
    plain = quick(*words, "--run=plain", ranks=3)
    run = cli(*words, "--run=seen", *wanted, "--trainer.devices=3")  # a program keeps torch's own words from its log
    assert run.code == plain.code == 0, run.output
    folder = tmp_path / "lightning_logs/seen"
    stems = [f"step-000000004-{what}rank{rank}" for what in ("", "memory-") for rank in (0, 2)]
    assert names(folder) == sorted([*(f"{stem}.txt" for stem in stems), *(f"{stem}.json.gz" for stem in stems[:2])])
    for rank in (0, 2):
        events = traced(folder / f"profiles/step-000000004-rank{rank}.json.gz")
        assert {RANGE + part for part in ("data wait", "forward", "backward", "optimizer", "rest")} <= events
        assert {"gloo:all_reduce", "aten::convolution_backward"} <= events
    report = run.output.split("Rank 0, steps 4 to 5")[1]
    assert re.search(r"ms a step: .*backward \d+%", report)
    assert re.search(r"The CPU computes nothing for \d+% of the time; the longest gap is [\d.]+ ms", report)
    assert re.search(r"Communication goes on for [\d.]+ ms a step, \d+% of it beside computing", report)
    convolutions = sum(isinstance(part, torch.nn.Conv2d) for part in MiniResNet(widths=[8, 16], blocks=1).modules())
    assert re.search(rf"aten::convolution_backward +{2 * convolutions} ", report)  # of the two micro-batches of a step
    assert "Profile of steps 4 to 5 of ranks 0, 2" in report
    assert "USDT" not in run.output
    assert "WARNING" not in run.output
    assert "[W" not in run.output  # torch's own words
    assert "Operators, by what they allocate" in run.output
    memory = (folder / "profiles/step-000000004-memory-rank2.txt").read_text()
    assert re.search(r"^ +[\d.]+ MB  parameters$", memory, re.MULTILINE)
    assert same.main([str(folder.parent / name) for name in ("plain", "seen")]) == 0


def ask(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "project", "profile", *words]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_a_word_to_a_run_that_goes_on(tmp_path):
    """A GPT, which was not written for this, on two ranks; it goes on until it has answered three times."""
    write_texts(tmp_path / "texts")
    words = ("fit", *GPT, "--run=gpt", "--trainer.devices=2", "--trainer.limit_val_batches=0", "--trainer.max_steps=100000")
    with (tmp_path / "output.txt").open("w") as output:
        run = subprocess.Popen(
            [sys.executable, "-m", "project", *words, "--trainer.max_epochs=-1"],
            cwd=tmp_path, env=environment(), stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    folder = tmp_path / "lightning_logs/gpt"
    try:
        wait_until(lambda: (folder / "life.jsonl").exists() or run.poll() is not None, 120, "it does not begin")
        answer = ask(tmp_path, "gpt", "--steps=2", "--ranks=all")
        assert answer.returncode == 0, answer.stderr + (tmp_path / "output.txt").read_text()
        assert re.findall(r"^Rank (\d), steps", answer.stdout, re.MULTILINE) == ["0", "1"]
        assert "aten::" in answer.stdout
        assert not (folder / FILE).exists()
        assert len(list(folder.glob("profiles/*.json.gz"))) == 2

        second = ask(tmp_path, "gpt", "--steps=1", "--memory")  # of rank 0
        assert second.returncode == 0, second.stderr
        assert second.stdout.count("Rank ") == 1
        assert len(list(folder.glob("profiles/*.json.gz"))) == 3

        (folder / FILE).write_text('{"step": 3}')  # somebody's own
        wait_until(lambda: "can't be answered" in (tmp_path / "output.txt").read_text(), 60, "nobody says so")
        assert not (folder / FILE).exists()
        beyond = ask(tmp_path, "gpt", "--ranks=2")
        assert beyond.returncode == 2
        assert "has no rank 2: its ranks are 0 to 1" in beyond.stderr
    finally:
        run.terminate()
        run.wait()
    assert run.returncode == 143, (tmp_path / "output.txt").read_text()
    late = ask(tmp_path, "gpt")
    assert (late.returncode, late.stdout) == (2, "")
    assert "is not running" in late.stderr
    assert not (folder / FILE).exists()


def test_a_step_that_never_comes_is_told(quick):
    run = quick("fit", DDP, *TINY, "--trainer.max_steps=2", "--profile.step=9", "--run=short")
    assert run.code == 0
    assert "WARNING Step 9 was to be recorded, and the run has ended after step 2" in run.output
    ranks = quick("fit", DDP, *TINY, "--trainer.max_steps=5", "--profile.step=4", "--profile.ranks=[0,7,9]")
    assert "WARNING There is no rank 7, 9 to profile, but 1 ranks." in ranks.output
    assert "Rank 0, steps 4 to 4" in ranks.output
    resumed = quick("fit", DDP, *TINY, "--trainer.max_steps=3", "--profile.step=1", "--run=short")
    assert resumed.code == 0
    assert "profile.step=1 is behind: the run goes on after step 2" in resumed.output


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("step=0", "profile.step is the number of a step, from 1 on, not 0"),
        ("steps=0", "profile.steps is a number from 1 to 1000, not 0"),
        ("ranks=[-1]", "The profile's ranks are a list of ranks"),
        ("nvtx=true", "profile.nvtx names the parts of a step for Nsight Systems, which needs a GPU"),
    ],
)
def test_settings_that_make_no_sense(quick, setting, message):
    run = quick("fit", DDP, *TINY, "--trainer.max_steps=2", f"--profile.{setting}", "--trainer.accelerator=cpu")
    assert run.code
    assert message in run.output
    assert "Traceback" not in run.output


@pytest.mark.slow
def test_what_the_memory_held_when_it_ran_out(quick, tmp_path):
    run = quick("fit", DDP, *TINY, "--run=large", "--trainer.callbacks=tests.watch.plugged.TooLarge", ranks=2)
    assert run.code
    (name,) = names(tmp_path / "lightning_logs/large")  # of the rank on which it did
    assert name == "out-of-memory-step-000000003-rank1.txt"
    text = (tmp_path / "lightning_logs/large/profiles" / name).read_text()
    assert "rank 1, step 2" in text
    assert "x (123, 457) float64 on cpu" in text
    assert "DefaultCPUAllocator" in run.output


def test_without_a_word_nothing_is_among_the_hooks_of_a_step():
    hooks = {name for name in vars(Profile) if name.startswith("on_")}
    assert hooks == {"on_train_start", "on_exception"}


# What is said of a profile ----------------------------------------------------------------------------------------------


def event(name, start, end, device=False, asynchronous=False, annotation=False, self_time=None, allocated=0):
    return SimpleNamespace(
        name=name, time_range=SimpleNamespace(start=start, end=end), is_async=asynchronous, is_user_annotation=annotation,
        device_type=DeviceType.CUDA if device else DeviceType.CPU,
        self_cpu_time_total=end - start if self_time is None else self_time,
        self_cpu_memory_usage=allocated, self_device_memory_usage=allocated,
    )  # fmt: skip


def test_a_gpu_is_judged_by_its_kernels():
    """Recorded by hand: a step of 10 ms, in which kernels take 5 ms and NCCL 3 ms, one of these alone."""
    events = [
        event(RANGE + "forward", 0, 4000, annotation=True),
        event(RANGE + "backward", 4000, 10000, annotation=True),
        event(RANGE + "forward", 100, 4100, device=True, annotation=True),  # the same on the device is not counted twice
        event("aten::conv2d", 0, 4000),
        event("conv_kernel", 1000, 4000, device=True),
        event("gemm", 5000, 7000, device=True),
        event("ncclDevKernel_AllReduce_Sum_f32", 5000, 8000, device=True),
    ]
    report = lines(events, 1, on_gpu=True)
    assert report[0] == "10 ms a step: backward 60%, forward 40%"
    assert report[1] == "The GPU computes nothing for 50% of the time; the longest gap is 3 ms, in backward"
    assert report[2] == (
        "Communication goes on for 3 ms a step, 67% of it beside computing; for 10% of the time nothing else goes on"
    )
    assert [line.split()[0] for line in report[5:]] == ["conv_kernel", "ncclDevKernel_AllReduce_Sum_f32", "gemm"]


def test_what_comes_after_the_last_step_does_not_count():
    """A validation, say; and on a GPU the kernels of the last step come after the host, and do."""
    events = [
        event(RANGE + "forward", 0, 1000, annotation=True),
        event(RANGE + "backward", 1100, 1500, annotation=True),
        event("conv_kernel", 500, 2000, device=True),
        event("gemm", 2600, 2700, device=True),  # of what follows
    ]
    report = lines(events, 1, on_gpu=True)
    assert report[0] == "2 ms a step: forward 50%, between steps 30%, backward 20%"
    assert report[1] == "The GPU computes nothing for 25% of the time; the longest gap is 0.5 ms, in forward"


def test_a_cpu_is_judged_by_its_operators():
    events = [
        event(RANGE + "forward", 0, 8000, annotation=True),
        event("DistributedDataParallel.forward", 0, 8000, annotation=True),
        event("aten::linear", 0, 2000, self_time=500),
        event("aten::addmm", 500, 2000, allocated=3e6),
        event("aten::addmm", 2000, 2000, allocated=-3e6),
        event("c10d::allreduce_", 2000, 2100),
        event("gloo:all_reduce", 1000, 3000, asynchronous=True, annotation=True),
        event("aten::mm", 8200, 8400),  # of a validation
    ]
    report = lines(events, 2, on_gpu=False)
    assert report[0] == "4 ms a step: forward 100%"
    assert report[1] == "The CPU computes nothing for 75% of the time; the longest gap is 6 ms, in forward"
    assert report[2].startswith("Communication goes on for 1 ms a step, 50% of it beside computing; for 12% of")
    assert [line.split() for line in report[-2:]] == [
        ["Operators,", "by", "what", "they", "allocate", "MB", "a", "step"],
        ["aten::addmm", "1.500"],
    ]
    assert lines([], 1, on_gpu=False) == ["Nothing was recorded."]


@pytest.mark.parametrize(
    "text", ['{"step": 3}', "[1]", '{"steps": "3"}', '{"ranks": []}', '{"memory": 1}', "{", '{"steps": true}']
)
def test_words_that_nobody_understands(text):
    with pytest.raises(ValueError, match=r"[Ss]teps|ranks|memory|JSON|Expecting"):
        Asked.of(text)
    assert Asked.of("") == Asked(5, (0,), False)


def test_steps_that_are_recorded_do_not_count_as_slow(quick):
    every = json.dumps({"class_path": "project.watch.throughput.Throughput", "init_args": {"every_n_steps": 2}})
    words = ("fit", DDP, *TINY, "--trainer.max_steps=12", "--data.source.init_args.train_size=4096")
    run = quick(*words, f"--trainer.callbacks={every}", "--profile.step=4", "--profile.steps=3", ranks=2)
    assert run.code == 0, run.output
    # Step 3 warms up, 4 to 6 are recorded, and 7 waits for the trace of rank 0; then 8 is measured.
    assert list(run.curve("speed/samples_per_s")) == [2, 8, 10, 12]


def test_an_evaluation_is_not_recorded(quick, tmp_path):
    """An epoch has two steps: the second one, 4, would have warmed up."""
    run = quick("fit", DDP, *TINY, "--trainer.max_steps=10", "--profile.step=5", "--profile.steps=3", "--run=it")
    assert run.code == 0, run.output
    assert "step-000000006-rank0.txt" in names(tmp_path / "lightning_logs/it")
    assert "Rank 0, steps 6 to 6" in run.output


def test_where_nothing_can_be_recorded_the_asker_is_told(quick, tmp_path):
    """A GPU whose counters are not for everybody, say."""
    broken = "--trainer.callbacks=tests.watch.plugged.NoProfiler"
    run = quick("fit", DDP, *TINY, "--trainer.max_steps=10", "--profile.step=5", "--run=it", broken, ranks=2)
    assert run.code == 0, run.output
    assert run.output.count("The steps can't be recorded: not for you. Training continues.") == 2  # a warning, and the table
    assert names(tmp_path / "lightning_logs/it") == ["step-000000006-rank0.txt"]
