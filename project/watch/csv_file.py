"""The file metrics.csv, one over all starts of a run. Lightning's writer would delete what an earlier start has written."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from project.untrusted import open_to_append, read_text, write_text

_LONGEST = 1 << 28  # bytes; it is written anew, from memory, where a run goes on
Row = dict[str, Any]


class CsvFile:
    """A file of rows, a step and its values each. `save` writes them; a value that is new makes a new column.

    Args:
        path: the file; one that exists is continued.
        until: rows of this step and later ones are left out, as these steps are taken again.
    """

    def __init__(self, path: Path, until: int | None = None) -> None:
        self.path = path
        self.metrics: list[Row] = []
        """The rows that are not written yet; Lightning's logger looks at this."""
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = self._read()
        self._names = ["step", *sorted({name for row in rows for name in row} - {"step"})]
        if rows:
            self._write([row for row in rows if until is None or int(row["step"]) < until])

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Adds a row, which `save` writes."""
        self.metrics.append({"step": step, **{name: float(value) for name, value in metrics.items()}})

    def save(self) -> None:
        """Writes what was logged to the file."""
        if not self.metrics:
            return
        new = {name for row in self.metrics for name in row} - set(self._names)
        if new or not self.path.exists():
            self._names += sorted(new)
            self._write([*self._read(), *self.metrics])
        else:
            with open_to_append(self.path) as file:
                csv.DictWriter(file, self._names).writerows(self.metrics)
        self.metrics.clear()

    def _read(self) -> list[Row]:
        try:
            rows = list(csv.DictReader(io.StringIO(read_text(self.path, _LONGEST, follow=False), newline="")))
        except FileNotFoundError:
            return []
        except (ValueError, csv.Error) as error:
            raise OSError(f"{self.path} is no CSV file: {error}") from error
        # The last line of a run that was killed may have been cut short.
        return [{name: value for name, value in row.items() if value} for row in rows if _is_whole(row)]

    def _write(self, rows: Sequence[Row]) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, self._names)
        writer.writeheader()
        writer.writerows(rows)
        write_text(self.path, text.getvalue())


def _is_whole(row: Row) -> bool:
    return None not in row and None not in row.values() and row.get("step", "").isdecimal() and len(row["step"]) < 20
