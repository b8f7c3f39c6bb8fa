"""Models around the op: download formats, checkpoints, tokenizers and the Llama family."""

from certjax.models import checkpoints as checkpoints
from certjax.models import llama as llama
from certjax.models.checkpoints import Checkpoint as Checkpoint
from certjax.models.convert import ConversionSummary as ConversionSummary
from certjax.models.convert import convert as convert
from certjax.models.convert import open_source as open_source
from certjax.models.gguf import read_gguf as read_gguf
from certjax.models.safetensors import read_safetensors as read_safetensors
from certjax.models.source import LazyTensor as LazyTensor
from certjax.models.source import Source as Source
from certjax.models.tokenizer import TextStream as TextStream
from certjax.models.tokenizer import Tokenizer as Tokenizer
