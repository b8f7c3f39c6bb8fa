"""A progress line on standard error; silent where that is no terminal, but for start and end."""

import sys
import threading
import time


class Progress:
    """Context manager and callback: `progress(done, total)` redraws the line at most five times a second.

    Args:
      label: what is being done.
      unit: printed behind the counts.
      after: seconds of silence; what is done by then is not mentioned. After them the label is printed even if nothing
        has called yet.
    """

    def __init__(self, label: str, unit: str = "", after: float = 0):
        self._label, self._unit, self._after = label, unit, after
        self._timer = threading.Timer(after, self._begin)
        self._timer.daemon = True
        self._start = self._drawn = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._last = ""

    def __enter__(self) -> "Progress":
        if self._after:
            self._timer.start()
        return self

    def _begin(self) -> None:
        if not self._last:
            print(f"{self._label} …", end="" if self._terminal else "\n", file=sys.stderr, flush=True)

    def __call__(self, done: int, total: int) -> None:
        """Reports that `done` of `total` is done."""
        now = time.monotonic()
        if now - self._start < self._after:
            return
        if not (self._last or self._terminal or self._after):
            self._begin()
        rate = done / max(now - self._start, 1e-9)
        self._last = (
            f"{self._label}: {done}/{total} {self._unit}  {rate:.0f}/s  {(total - done) / max(rate, 1e-9):.0f} s left"
        )
        if self._terminal and (now - self._drawn > 0.2 or done == total):
            self._drawn = now
            print(f"\r\033[K{self._last}", end="", file=sys.stderr, flush=True)

    def __exit__(self, *_) -> None:
        self._timer.cancel()
        if self._after and not self._last and self._terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        if self._last:
            print(f"\r\033[K{self._last}" if self._terminal else self._last, file=sys.stderr, flush=True)
