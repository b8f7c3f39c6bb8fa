"""The folder of a run: `settings.json`, and `rows.jsonl` with one line a result."""

import json
import os
from pathlib import Path
from typing import Any


class Run:
    """The folder of a run.

    Args:
      folder: made if it is not there.
      settings: what the rows depend on; a folder where one of them is another is refused, new ones are added.

    Raises:
      ValueError: the folder holds another run, or something else, or cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str], settings: dict[str, Any]):
        self._file = Path(folder) / "rows.jsonl"
        kept = Path(folder) / "settings.json"
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            if not kept.exists() and any(Path(folder).iterdir()):
                raise ValueError(f"{folder}: is not empty and holds no run; give a new folder")
            before = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
        except OSError as error:
            raise ValueError(f"{folder}: cannot be written: {error.strerror}") from error
        settings = json.loads(json.dumps(settings))
        other = [name for name in settings if before.get(name, settings[name]) != settings[name]]
        if other:
            name = other[0]
            raise ValueError(
                f"{folder}: holds a run with another {name} ({before.get(name)}, now {settings[name]}); "
                "give a new folder"
            )
        new = kept.with_suffix(".new")
        new.write_text(json.dumps(before | settings, indent=1), encoding="utf-8")
        new.replace(kept)  # all of it or nothing
        self._mend()
        self.done = {row["id"] for row in read_rows(folder)} if self._file.exists() else set()

    def _mend(self) -> None:
        """Drops what a killed run left of a line."""
        if self._file.exists():
            data = self._file.read_bytes()
            whole = data[: data.rfind(b"\n") + 1]
            if whole != data:
                self._file.write_bytes(whole)

    def add(self, row: dict[str, Any]) -> None:
        """Appends a row; its `id` must be new."""
        if row["id"] in self.done:
            raise ValueError(f"row {row['id']} is there already")
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self.done.add(row["id"])


def read_rows(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of a run.

    Raises:
      ValueError: the folder holds none.
    """
    file = Path(folder) / "rows.jsonl"
    if not file.is_file():
        raise ValueError(f"{folder}: holds no rows.jsonl; give the folder of a `certjax eval` or `certjax audit` run")
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
