"""Results as JSON lines: appended one by one, so that a run that was stopped goes on where it was."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Rows:
    """A file of rows, each with an `id` of its own and the settings of the run in `run`.

    A last line that was cut off is removed, and its row is not counted as there.

    Args:
      path: the file; made where it is missing, with its folder.
      settings: what must be alike in all rows, JSON values.

    Attributes:
      rows: what the file holds, in its order.

    Raises:
      ValueError: the file cannot be used, a line is damaged, an id occurs twice, or rows are of other settings.
    """

    def __init__(self, path: str | os.PathLike[str], settings: Mapping[str, Any]):
        self._path, self._settings = Path(path), json.loads(json.dumps(settings))
        self.rows: list[Row] = []
        self._ids: set[str] = set()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            content = self._path.read_bytes() if self._path.exists() else b""
            whole = content[: content.rfind(b"\n") + 1]
            if whole != content:
                self._path.write_bytes(whole)
        except OSError as error:
            raise ValueError(f"{path}: cannot be used: {error.strerror}") from error
        for number, line in enumerate(whole.splitlines(), 1):
            self._take(number, line)

    def __contains__(self, name: str) -> bool:
        return name in self._ids

    def add(self, row: Row) -> None:
        """Appends a row; it is on its way to the disk when this returns."""
        if row["id"] in self._ids:
            raise ValueError(f"{self._path}: has a row {row['id']} already")
        row = {**row, "run": self._settings}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self._ids.add(row["id"])
        self.rows.append(row)

    def _take(self, number: int, line: bytes) -> None:
        try:
            row = json.loads(line)
            name, settings = row["id"], row["run"]
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{self._path}: line {number} is damaged: {line[:60]!r}; delete it") from None
        if name in self._ids:
            raise ValueError(f"{self._path}: {name} occurs twice; delete one of its lines")
        if settings != self._settings:
            name = next(n for n in {**settings, **self._settings} if settings.get(n) != self._settings.get(n))
            raise ValueError(
                f"{self._path}: holds rows of another run: {name} was {settings.get(name)!r}, is "
                f"{self._settings.get(name)!r}; use another folder"
            )
        self._ids.add(name)
        self.rows.append(row)
