"""The file report.html: what a run did, on one page that opens anywhere, without a server or a network.

The file summary.json beside it is for programs.
"""

import json
import math
from collections.abc import Iterator, Mapping
from datetime import timedelta
from html import escape
from pathlib import Path

from project.errors import UserError
from project.untrusted import write_text
from project.watch.charts import COLOURS, Line, Mark
from project.watch.history import SKIPPED, History, Life, date
from project.watch.page import Chart, charts, html, of_the_module, section, table

PAGE, SUMMARY = "report.html", "summary.json"
_SAID = 60  # warnings: the last ones
_FAULTS = 100  # marks: the last ones
_STAGES = ("train", "val", "test")
_FIRST = ("loss", "acc")  # of what is learned; the rest as it was logged
_PHASES = {
    "data_wait": ("waiting for data", 1),
    "forward": ("forwards", 2),
    "backward": ("backwards", 0),
    "gradient_sync": ("waiting for other ranks' gradients", 4),
    "optimizer": ("the optimiser's step", 5),
    "rest": ("the rest", 7),
}
"""The phases of a step, with their names and colours."""
_SPEED = {
    "samples/s": {"speed/samples_per_s": ("all ranks", 0)},
    "shares of a step": {f"speed/{name}": named for name, named in _PHASES.items()},
    "TFLOP/s of a rank": {"speed/tflops": ("TFLOP/s", 0)},
    "share of the peak (MFU)": {"speed/mfu": ("MFU", 0)},
}
_HEALTH = {
    "the worst rank against the usual one": {
        "speed/worst_data": ("by its data", 1),
        "speed/worst_compute": ("by its computing", 0),
    },
    "steps left out": {SKIPPED: ("not finite", 3), "train/fp16_skipped_steps": ("by fp16's loss scaling", 5)},
    "memory of the largest rank, GB": {"run/memory_gb": ("host", 0), "run/gpu_memory_gb": ("GPU, at most", 1)},
    "busy cores of a rank": {"run/cpu_cores": ("cores", 0)},
    "share of time in which GPUs compute": {"run/gpu_use": ("GPUs", 0)},
    "seconds that a checkpoint takes": {"run/checkpoint_s": ("seconds, beside the training", 0)},
    "MB of a checkpoint": {"run/checkpoint_mb": ("MB", 0)},
}
_OF_RANKS = {
    "ranks/data_ms/": "ms a step that a rank waits for its data",
    "ranks/compute_ms/": "ms a step that a rank computes",
}


def write(history: History) -> Path:
    """Writes the page and the summary of a run into its folder."""
    write_text(history.folder / SUMMARY, json.dumps(history.summary(), indent=1))
    write_text(path := history.folder / PAGE, page(history))
    return path


def page(history: History) -> str:
    """Returns the page of one run."""
    marks = _marks(history)
    health = [*_of_ranks(history), *_speed(history, _HEALTH)]
    return html(
        f"Run {history.name}",
        [
            _head(history),
            *section("Is it learning?", charts(_learning(history), "steps", marks)),
            *section("Is it fast?", _where_time_went(history), charts(_speed(history, _SPEED), "steps", marks, from_zero=True)),
            *section("Is it healthy?", charts(health, "steps", marks, from_zero=True)),
            *section("Its life", _life(history)),
            *section(f"What it warned of{_cut(history)}", _warnings(history)),
            *section("Its configuration", f"<pre>{escape(history.config_text)}</pre>" if history.config_text else ""),
            *section("Go on with it", _go_on(history)),
        ],
    )


def _head(history: History) -> str:
    rows = [[name, escape(value)] for name, value in facts(history).items() if value]
    return f"<h1>Run {escape(history.name)}</h1>{table(rows)}"


def facts(history: History) -> dict[str, str]:
    """Returns the figures of a run, as texts."""
    last = history.lives[-1] if history.lives else None
    speed, batch = history.recent_median("speed/samples_per_s"), history.global_batch
    known = last.known if last else {}
    return {
        "state": f"{history.state}, after step {history.step:,}" + (f": {last.why}" if last and last.why else ""),
        "samples": f"{history.step * batch:,} in global batches of {batch:,}" if batch else "",
        "time": str(timedelta(seconds=round(history.seconds))) if history.seconds else "",
        "speed": f"{speed:,.0f} samples/s on {_ranks(last)}" if speed and last else "",
        "starts": f"{len(history.lives)}",
        "precision": str(known.get("precision", "")),
        "device": str(known.get("device", "")),
        "versions": ", ".join(f"{name} {value}" for name, value in known.get("versions", {}).items()),
        "commit": str(known.get("commit") or ""),
        "image": str(known.get("image") or ""),
        "newest checkpoint": str(history.checkpoints[0][0]) if history.checkpoints else "",
    }


def _ranks(life: Life) -> str:
    return "1 rank" if life.ranks == 1 else f"{life.ranks} ranks"


def _marks(history: History) -> list[Mark]:
    """Returns a mark for each start but the first, and for each fault."""
    starts = [
        Mark(life.step, f"{date(life.time)}: started again at step {life.step} on {_ranks(life)}, was {before.state}")
        for before, life in zip(history.lives, history.lives[1:], strict=False)
    ]
    failed = [
        Mark(life.end_step, f"{date(life.end)}: failed after step {life.end_step}: {life.why}", fault=True)
        for life in history.lives
        if life.state == "failed"
    ]
    left_out = [
        Mark(point.step, f"{date(point.time)}: step {point.step} was left out, it was not finite", fault=True)
        for point in history.curves.get(SKIPPED, ())
    ]
    return [*starts, *failed, *left_out[-_FAULTS:]]


def _learning(history: History) -> Iterator[Chart]:
    """Yields the charts of what was logged, other than speed: training and validation of one thing in one chart."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for tag in history.curves:
        if of_the_module(tag):
            stage, _, name = tag.partition("/")
            known = stage in _STAGES and name
            groups.setdefault((name if known else tag), []).append((stage if known else tag, tag))
    for name, tags in sorted(groups.items(), key=lambda group: group[0] not in _FIRST):
        lines = []
        for stage, tag in sorted(tags, key=lambda pair: _order(pair[0])):
            colour = _order(stage) if stage in _STAGES else 0
            lines.append(Line(tag, _over_steps(history, tag), colour))
        yield name, lines


def _order(stage: str) -> int:
    return _STAGES.index(stage) if stage in _STAGES else len(_STAGES)


def _over_steps(history: History, tag: str) -> list[tuple[float, float]]:
    return [(point.step, point.value) for point in history.curves[tag]]


def _speed(history: History, wanted: Mapping[str, Mapping[str, tuple[str, int]]]) -> Iterator[Chart]:
    for title, tags in wanted.items():
        logged = {tag: named for tag, named in tags.items() if tag in history.curves}
        lines = [Line(name, _over_steps(history, tag), colour) for tag, (name, colour) in logged.items()]
        yield title, lines


def _of_ranks(history: History) -> Iterator[Chart]:
    """Yields charts with a line for each rank, named with its host."""
    for start, title in _OF_RANKS.items():
        tags = sorted((tag for tag in history.curves if tag.startswith(start)), key=_by_rank)
        named = [(tag, tag.removeprefix(start).partition(".")) for tag in tags]
        lines = [
            Line(f"rank {rank}, {name}", _over_steps(history, tag), colour)
            for colour, (tag, (rank, _, name)) in enumerate(named)
        ]
        yield title, lines


def _by_rank(tag: str) -> tuple[int, str]:
    rank, _, name = tag.rpartition("/")[2].partition(".")
    return (int(rank) if rank.isdigit() else 0), name


def _where_time_went(history: History) -> str:
    known = [(*_PHASES[name], share) for name, share in history.shares.items() if math.isfinite(share)]
    if not known:
        return ""
    bar = "".join(f'<div style="width:{100 * share:.2f}%;background:{COLOURS[colour]}"></div>' for _, colour, share in known)
    legend = "".join(
        f'<span><i style="background:{COLOURS[colour]}"></i>{name}: {share:.1%}</span>' for name, colour, share in known
    )
    return f'<p>Of a step, since the last start:</p><div class="bar">{bar}</div><div class="legend">{legend}</div>'


def _life(history: History) -> str:
    rows = []
    for life in history.lives:
        hosts = life.known.get("hosts", {})
        ended = f'<span class="{escape(life.state)}">{escape(life.state)}</span>'
        rows.append(
            [
                escape(date(life.time)),
                f"{life.step:,} to {life.end_step:,}",
                f"{_ranks(life)}: {escape(', '.join(f'{count} on {name}' for name, count in hosts.items()))}",
                escape(str(timedelta(seconds=round(life.seconds)))),
                ended + (f", {escape(life.why)}" if life.why else ""),
            ]
        )
    return table(rows, ("started", "steps", "ranks", "lasted", "ended")) if rows else ""


def _cut(history: History) -> str:
    return f" (the last {_SAID} of {len(history.warnings)})" if len(history.warnings) > _SAID else ""


def _warnings(history: History) -> str:
    rows = [
        [escape(when), f'<span class="{level}">{level}</span>', escape(text)] for when, level, text in history.warnings[-_SAID:]
    ]
    return table(rows) if rows else ""


def _go_on(history: History) -> str:
    if not history.checkpoints or not history.config_text:
        return ""
    folder = f"{history.folder.parent.name}/{history.name}"
    newest, config = history.checkpoints[0][0].name, f"{folder}/config.yaml"
    lines = [
        "# It goes on from its newest checkpoint, on any number of ranks:",
        f"python -m project fit --config {config} --run {history.name}",
        "# Its figures on the test set, with its best weights:",
        f"python -m project test --config {config} --run {history.name}",
        *_weights(history, folder, config, newest),
    ]
    return f"<pre>{escape(chr(10).join(lines))}</pre>"


def _weights(history: History, folder: str, config: str, newest: str) -> list[str]:
    if history.checkpoints[0][0].is_dir():
        lines = ["# Its checkpoints lie in parts, one of each rank; as one file:"]
        return [*lines, f"python -m project export --config {config} --run {history.name} --to checkpoint"]
    lines = ["# Its weights, in Python:"]
    return [*lines, f'weights = torch.load("{folder}/checkpoints/{newest}", weights_only=True)["state_dict"]']


def refuse_nothing(history: History) -> None:
    """Raises a UserError for a folder that no run has written to."""
    if not history.lives and not history.curves:
        raise UserError(
            f"{history.folder} has neither curves nor a life.jsonl: no training has begun there, or it was trained by an older "
            "version of this project. HINT: give the name of a run, or its folder."
        )
