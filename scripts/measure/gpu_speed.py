"""The speeds of scripts/gpu_check: our training against the plain loop, and against what the GPU could do."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[2]
OK, BAD, SLOW = "ok", "bad", "slow"  # slow: it works, and misses its goal
TIMES_PLAIN, SHARE_OF_PEAK = 5.0, 0.35
_RECORDS = ("reduce-overhead", "max-autotune")  # compiles that record graphs of their own, which fit into no other graph


@dataclass
class Result:
    """What a check has to say: its state, the figure, and whatever else belongs into gpu.json."""

    state: str
    figure: str
    more: dict[str, Any] = field(default_factory=dict)


def speeds(on: str, batch: int, programs: Callable[[Any], Sequence[Any]]) -> dict[str, Any]:
    """Samples a second of programs that take turns, and how the first one's time is spent."""
    from project.cluster.cores import cores
    from scripts.bench.bench import Comparison
    from scripts.bench.interleaved import interleaved

    place, folder = on == "cuda", Path("programs").absolute()
    folder.mkdir()
    comparison = Comparison(
        config=ROOT / "configs/bench.yaml", folder=folder, batch_size=batch, images=50_000, workers=lambda _: 0,
        threads=cores, flops=0.0, turns=3 if place else 1, steps=5 if place else 1,
    )  # fmt: skip
    measured = interleaved(programs(comparison), folder, comparison.turns, comparison.steps, None, 0.5 if place else 0.0)
    return {
        name: {
            "samples_per_s": [batch / seconds for seconds in each.seconds],
            "steps_a_turn": each.steps,
            "phases": each.phases,
        }
        for name, each in measured.items()
    }


def against_plain(on: str) -> Result:
    """At batch 64: the config's fp16, captured (also compiled) and not, against the plain loop in fp32, with workers."""
    from project.cluster.cores import cores

    batch = 64 if on == "cuda" else 4
    workers = max(0, min(8, cores() - 2))
    ways: list[tuple[str, ...]] = [("--trainer.capture=auto",), ("--trainer.capture=none",)]
    if on == "cuda":
        ways.insert(1, ("--trainer.capture=auto", "--model.compile=default"))

    def programs(comparison: Any) -> list[Any]:
        plain = comparison.plain(1, "fp32", f"--batch-size={batch}", f"--workers={workers}")
        variants = [comparison.project(_named(way), 1, f"--data.batch_size={batch}", *way) for way in ways]
        return [plain, *variants]

    results = speeds(on, batch, programs)
    speed = {name: median(each["samples_per_s"]) for name, each in results.items()}
    plain = speed.pop("plain in fp32")
    spent = results["plain in fp32"]["phases"]
    data = spent["data"] / (sum(spent.values()) or 1)
    best = max(speed.values()) / plain
    figure = ", ".join(f"{name} {value / plain:.2f} times" for name, value in speed.items())
    state = OK if on == "cpu" or best >= TIMES_PLAIN else SLOW
    return Result(state, f"{figure}; plain {plain:,.0f} samples/s, {data:.0%} of it waiting for data", results)


def share_of_peak(on: str, *compiles: str) -> Result:
    """At batch 1,024 in bf16, channels_last: the best of these ways to run it counts."""
    import torch

    from project.model import MiniResNet
    from project.watch.flops import flops, peak_of

    batch = 1024 if on == "cuda" else 4
    captures = {mode: "none" if mode in _RECORDS else "auto" for mode in compiles}
    ways = [(f"--trainer.capture={capture}", f"--model.compile={mode}") for mode, capture in captures.items()]
    if "none" in compiles:
        ways.append(("--trainer.capture=none", "--model.compile=none"))
    words = (f"--data.batch_size={batch}", "--trainer.precision=bf16-mixed", "--model.channels_last=true")
    results = speeds(on, batch, lambda comparison: [comparison.project(_named(way), 1, *words, *way) for way in ways])
    speed = {name: median(each["samples_per_s"]) for name, each in results.items()}
    if on == "cpu":
        return Result(OK, ", ".join(f"{name} {value:,.0f} samples/s" for name, value in speed.items()), results)
    device = torch.cuda.get_device_properties(0)
    peak = peak_of(device.name, device.multi_processor_count, torch.bfloat16, False)
    if peak is None:
        return Result(BAD, f"nobody knows the bf16 peak of {device.name}: {speed}", results)
    shares = {name: flops(MiniResNet(), (3, 32, 32)) * value / peak for name, value in speed.items()}
    figure = ", ".join(f"{name} {share:.0%} ({speed[name]:,.0f}/s)" for name, share in shares.items())
    return Result(OK if max(shares.values()) >= SHARE_OF_PEAK else SLOW, figure, results)


def _named(words: Sequence[str]) -> str:
    """What a program is called: by its settings."""
    return " ".join(argument.rpartition(".")[2].replace("=", " ") for argument in words) or "ours"
