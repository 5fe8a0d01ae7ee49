"""What the benchmark found: a table for the terminal, and a picture."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

_COLOURS = {"plain": "#9aa0a6", "ours in fp32": "#7aa6da", "ours": "#1a5fb4"}
_UNSEEN = ("copy", "forward", "backward", "sync", "optimiser")  # of a step that is replayed from a CUDA graph


def spread(values: Sequence[float], form: str) -> str:
    """The median, the smallest and the largest."""
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def show(results: dict[str, Any], console: Console) -> None:
    for training in results["training"]:
        programs = training["programs"]
        ranks = f"{training['ranks']} process{'es' if training['ranks'] > 1 else ''}"
        table = Table(title=f"Training, {ranks}, batch {results['batch_size']} each", title_justify="left")
        table.add_column("")
        for name in programs:
            table.add_column(name, justify="right")
        rows: dict[str, list[str]] = {
            "samples/s": [spread(each["samples_per_s"], ",.0f") for each in programs.values()],
            "times the plain loop in fp32": [spread(each["ratio"], ".2f") for each in programs.values()],
            **{
                f"times the plain loop in {precision}": [
                    spread(each[f"ratio_in_{precision}"], ".2f") if f"ratio_in_{precision}" in each else ""
                    for each in programs.values()
                ]
                for precision in training["peak_flops"]
                if precision != "fp32"
            },
            "steps a turn": [f"{each['steps']:,}" for each in programs.values()],
            "CPU seconds per 1,000 samples": [f"{each['cpu_s_per_1000']:.2f}" for each in programs.values()],
            "peak memory": [f"{each['peak_memory'] / 2**30:.2f} GiB" for each in programs.values()],
            "TFLOP/s": [f"{each['flops'] / 1e12:.3f}" for each in programs.values()],
        }
        for precision, flops in training["peak_flops"].items():
            rows[f"share of a matrix product in {precision}"] = [f"{each['flops'] / flops:.0%}" for each in programs.values()]
        for phase in next(iter(programs.values()))["phases_ms"]:
            rows[f"  {phase}, ms a step"] = [_phase(each["phases_ms"], phase) for each in programs.values()]
        for name, cells in rows.items():
            table.add_row(name, *cells)
        console.print(table)
    loaders, alone = results["loading"], results["framework"]
    table = Table(title="Alone", title_justify="left")
    for column in ("", "plain", "ours", ""):
        table.add_column(column, justify="right" if column else "left")
    table.add_row(
        "data, samples/s and core",
        *(f"{median(values):,.0f}" for values in loaders["samples_per_s"].values()),
        f"{spread(loaders['ratio'], '.1f')} times",
    )
    table.add_row(
        f"framework, us a step on {alone['ranks']} ranks",
        *(f"{value:,.0f}" for value in alone["us_a_step"].values()),
        f"{spread(alone['us_more'], '+.0f')} us",
    )
    for phase in alone["phases_us"]["plain"]:
        table.add_row(f"  {phase}", *(f"{each[phase]:,.0f}" for each in alone["phases_us"].values()), "")
    console.print(table)


def _colour(name: str) -> str:
    return _COLOURS.get(name, _COLOURS["plain"])


def _phase(spent: dict[str, float], phase: str) -> str:
    return "in logging" if phase in _UNSEEN and not spent["forward"] else f"{spent[phase]:.2f}"


def draw(results: dict[str, Any], path: Path) -> None:
    """Bars: samples a second of each program, for each number of ranks."""
    bars = [
        (
            f"{name}, {training['ranks']} process{'es' if training['ranks'] > 1 else ''}",
            name,
            each["samples_per_s"],
            each["ratio"],
        )
        for training in results["training"]
        for name, each in training["programs"].items()
    ]
    longest = max(max(values) for _, _, values, _ in bars)
    height, width, left = 28, 420, 190
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 150}" height="{height * len(bars) + 40}" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="20" font-weight="bold">Samples/s, batch {results["batch_size"]} a process</text>',
    ]
    for number, (label, name, values, ratios) in enumerate(bars):
        top, at = 34 + number * height, median(values)
        low, high = (left + width * value / longest for value in (min(values), max(values)))
        lines += [
            f'<text x="{left - 8}" y="{top + 14}" text-anchor="end">{label}</text>',
            f'<rect x="{left}" y="{top}" width="{width * at / longest:.0f}" height="18" fill="{_colour(name)}"/>',
            f'<line x1="{low:.0f}" x2="{high:.0f}" y1="{top + 9}" y2="{top + 9}" stroke="black"/>',
            f'<text x="{left + width + 8}" y="{top + 14}">{at:,.0f}  ({median(ratios):.2f} x)</text>',
        ]
    path.write_text("\n".join([*lines, "</svg>", ""]))
