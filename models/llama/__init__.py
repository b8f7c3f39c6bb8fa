"""Llama-family decoders: configuration, weights, prefill, generation."""

from certjax.models.llama.config import LlamaConfig as LlamaConfig
from certjax.models.llama.generate import GenerateResult as GenerateResult
from certjax.models.llama.generate import decode as decode
from certjax.models.llama.generate import generate as generate
from certjax.models.llama.modeling import DecodeAttention as DecodeAttention
from certjax.models.llama.modeling import Llama as Llama
from certjax.models.llama.params import abstract_params as abstract_params
from certjax.models.llama.params import load_model as load_model
from certjax.models.llama.params import params_from_tensors as params_from_tensors
from certjax.models.llama.prefill import prefill as prefill
from certjax.models.llama.prefill import unpadded as unpadded
from certjax.models.llama.rope_config import RopeConfig as RopeConfig
from certjax.models.llama.snapshot import Snapshot as Snapshot
