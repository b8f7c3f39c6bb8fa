"""Progress of work on files: callbacks that are told what is done and what there is in all."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

Progress = Callable[[int, int], None]


def halves(progress: Progress | None) -> tuple[Progress | None, Progress | None]:
    """`progress` for each of two passes over the same bytes."""
    if progress is None:
        return None, None
    return lambda done, total: progress(done, 2 * total), lambda done, total: progress(total + done, 2 * total)


@contextlib.contextmanager
def watching(folder: Path, total: int, progress: Progress | None) -> Iterator[None]:
    """Tells `progress` twice a second how large the files in `folder` are: Orbax itself does not say."""
    if progress is None:
        yield
        return
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.5):
            with contextlib.suppress(OSError):  # files come and go
                size = sum(file.stat().st_size for file in folder.parent.rglob("*") if file.is_file())
                progress(min(size, total) // 10**6, total // 10**6)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
