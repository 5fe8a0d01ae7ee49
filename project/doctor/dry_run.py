"""Will it fit? `python -m project fit --config X --dry_run` says what each rank would hold, on any number of ranks.

Nothing is trained and nobody else is started: the network is on paper (train/on_paper.py).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from project.errors import UserError
from project.train.foretold import USABLE, Foretold, best_option, not_reckoned
from project.train.held import Held, Sharing, in_bytes

_WIDE = 150  # columns, where no terminal says how many there are
_HOST = 8  # ranks on a host, where the YAML doesn't say


@dataclass(frozen=True)
class Row:
    """So many ranks, and what one of them would hold."""

    sharing: Sharing
    held: Held
    why_not: str = ""
    """Such a run would be refused."""


def numbers(words: str, here: int) -> list[int]:
    """Of ranks, from `--dry_run=8,64`; without any, those of the YAML. `here`: these."""
    found = [one for one in words.replace(" ", "").split(",") if one not in ("", "true", "True")]
    if not all(one.isdigit() and int(one) for one in found):
        raise UserError(f"--dry_run={words}: these are numbers of ranks. HINT: --dry_run=8,64,1024.")
    return sorted({int(one) for one in found}) or [here if here > 1 else 2]


def per_host(ranks: int, devices: int) -> int:
    """Ranks on a host: as many as the YAML has devices."""
    return min(ranks, devices if devices > 1 else _HOST)


def rows(
    foretold: Foretold, sharing: Sharing, ranks: Sequence[int], devices: int, accumulation: Callable[[int], int]
) -> list[Row]:
    """A row for each number of ranks, and DDP's and the sharded one beside each other.

    `accumulation`: micro-batches of a step, on so many ranks; a UserError says why there can be no such step.
    """
    found = []
    for count in ranks:
        why_not, many = "", 1
        try:
            many = accumulation(count)
        except UserError as error:
            why_not = str(error).partition(" HINT:")[0]
        here = replace(sharing, ranks=count, per_host=per_host(count, devices), accumulation=many)
        found.append(Row(replace(here, shard=here.shard or "full"), _none, why_not))
    ddp = replace(found[0].sharing, shard=None, ranks=max(2, found[0].sharing.ranks), accumulation=1, shared_by=1)
    everyone = [Row(ddp, _none), *found] if sharing.shard is None else [*found, Row(ddp, _none)]
    return [replace(one, held=foretold.held(one.sharing)) for one in everyone]


_none = Held(0, 0, 0, None, 0, None, 0)


def show(
    foretold: Foretold, found: Sequence[Row], wanted: Sharing, about: Iterable[str], room: Callable[[int], int | None]
) -> None:
    """The table, and what is to be said of it. `room`: what a device here has, for so many ranks on this host."""
    console = Console()
    if not console.is_terminal:
        console.width = _WIDE
    for line in about:
        console.print(line, highlight=False, soft_wrap=True)
    names = ("parameters", "gradients", "optimiser", "gathered", "activations", "other", "total")
    table = Table("ranks", "hosts", "strategy", title="What one rank holds, at most", title_justify="left")
    for name in names:
        table.add_column(name, justify="right")
    for one in found:
        table.add_row(*_cells(one))
    console.print(table)
    for line in _said(foretold, found, wanted, room):
        console.print(line, highlight=False, soft_wrap=True)


def _cells(one: Row) -> list[str]:
    sharing, held = one.sharing, one.held
    at_host = " (host)" if held.offloaded else ""
    gradients = in_bytes(held.whole_gradients) + " *" if held.whole_gradients else in_bytes(held.gradients) + at_host
    partly = ">= " if held.unknown else ""
    return [
        "any" if sharing.shard is None else f"{sharing.ranks:,}",
        "" if sharing.shard is None else f"{-(-sharing.ranks // sharing.per_host):,}",
        "ddp" if sharing.shard is None else f"sharded, {sharing.shard}",
        in_bytes(held.parameters) + at_host,
        gradients,
        "not known" if held.optimizer is None else in_bytes(held.optimizer) + at_host,
        in_bytes(held.gathered),
        "not known" if held.activations is None else in_bytes(held.activations),
        in_bytes(held.others),
        partly + in_bytes(held.total),
    ]


def _said(foretold: Foretold, found: Sequence[Row], wanted: Sharing, room: Callable[[int], int | None]) -> list[str]:
    mine = [one for one in found if (one.sharing.shard is None) == (wanted.shard is None)]
    said = []
    if any(one.held.whole_gradients for one in found):
        many = ", ".join(
            f"{one.sharing.accumulation} on {one.sharing.ranks:,} ranks" for one in found if one.held.whole_gradients
        )
        said.append(
            f"* whole, until the last micro-batch of a step ({many}): they are sent once a step. A smaller global batch, or "
            "a larger micro-batch, makes it one micro-batch, and gradients as large as the parameters."
        )
    said += [line] if (line := not_reckoned(mine[-1].sharing)) else []
    said += [f"{what} not known: {why}" for what, why in mine[-1].held.unknown.items()]
    said += [f"{one.sharing.ranks:,} ranks: {one.why_not}" for one in found if one.why_not]
    return said + [_fits(foretold, one, room) for one in mine]


def _fits(foretold: Foretold, one: Row, room: Callable[[int], int | None]) -> str:
    who = "ddp" if one.sharing.shard is None else f"{one.sharing.ranks:,} ranks"
    has = room(1 if one.sharing.on_gpu else one.sharing.per_host)
    if has is None:
        return f"{who}: what a device has is not known here."
    known = "" if not one.held.unknown else ", as far as it is known"
    shares = "" if one.sharing.on_gpu else f", shared by {one.sharing.per_host}"
    if one.held.total <= USABLE * has:
        return f"{who}: fits a device like the one here{known} ({in_bytes(has)} each{shares})."
    found = best_option(foretold, one.sharing)
    hint = "a smaller micro-batch, or more ranks" if found is None else f"{found[0]}: {in_bytes(found[1].total)}"
    return f"{who}: does not fit a device like the one here ({in_bytes(has)} each{shares}). HINT: {hint}."


def about(foretold: Foretold, samples: int, wanted: Sharing, strategy: Any, precision: str) -> list[str]:
    """What is reckoned with."""
    kinds = sorted({type(block).__name__ for _, block in foretold.blocks})
    many = sum(one.numel() for one in foretold.module.parameters())
    kind = strategy if isinstance(strategy, str) else type(strategy).__name__
    lines = [
        f"{type(foretold.module).__name__}: {_count(many)} parameters, {len(foretold.blocks)} block(s) of "
        f"{', '.join(kinds) or '-'}; micro-batch of {samples or '?'}; precision {precision}; on {foretold.device.type}."
    ]
    if wanted.shard is None:
        lines.append(f"trainer.strategy is {kind}: each rank holds everything. Beside it, what strategy=sharded would hold.")
    return lines


def _count(number: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)
