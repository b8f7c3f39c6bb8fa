"""A progress line on standard error; silent where that is no terminal, but for start and end."""

import sys
import time


class Progress:
    """Context manager and callback: `progress(done, total)` redraws the line at most five times a second.

    Args:
      label: what is being done.
      unit: printed behind the counts.
    """

    def __init__(self, label: str, unit: str = ""):
        self._label, self._unit = label, unit
        self._start = self._drawn = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._last = ""

    def __enter__(self) -> "Progress":
        return self

    def __call__(self, done: int, total: int) -> None:
        """Reports that `done` of `total` is done."""
        if not (self._last or self._terminal):
            print(f"{self._label} …", file=sys.stderr, flush=True)
        now = time.monotonic()
        rate = done / max(now - self._start, 1e-9)
        self._last = (
            f"{self._label}: {done}/{total} {self._unit}  {rate:.0f}/s  {(total - done) / max(rate, 1e-9):.0f} s left"
        )
        if self._terminal and (now - self._drawn > 0.2 or done == total):
            self._drawn = now
            print(f"\r\033[K{self._last}", end="", file=sys.stderr, flush=True)

    def __exit__(self, *_) -> None:
        if self._last:
            print(f"\r\033[K{self._last}" if self._terminal else self._last, file=sys.stderr, flush=True)
