"""Tables that fit a terminal: where there is no room for all columns, the least important ones are left out."""

from collections.abc import Sequence

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table


def fit_table(table: Table, console: Console, least_important: Sequence[str]) -> Table:
    """Removes columns, in this order, until the table fits the console; returns it."""
    unlimited = console.options.update(max_width=10_000)
    for name in least_important:
        if Measurement.get(console, unlimited, table).maximum > console.width:
            table.columns = [column for column in table.columns if column.header != name]
    return table
