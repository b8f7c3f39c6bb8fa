"""Checkpoints for the commands: with a tokenizer, and with a progress display where loading takes long."""

from certjax.eval.progress import Progress
from certjax.models import Tokenizer, checkpoints
from certjax.models.checkpoints import Checkpoint


def load(checkpoint: str) -> tuple[Checkpoint, Tokenizer]:
    """A checkpoint that has a tokenizer, and that.

    Raises:
      ValueError: it cannot be read, or has none.
    """
    with Progress("loading the model", "MB", after=2) as progress:
        loaded = checkpoints.load(checkpoint, progress=progress)
    if loaded.tokenizer is None:
        raise ValueError(f"{checkpoint}: has no tokenizer; convert a model that carries one")
    return loaded, Tokenizer(loaded.tokenizer, loaded.tokenizer_config)
