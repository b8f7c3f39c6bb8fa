"""Peak memory of converting and of loading: below 1.3 × the model in float32, whatever the file."""

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, quants
from safetensors.numpy import save_file

from certjax.models.llama import LlamaConfig
from certjax.models.llama.params import tensor_table
from tests.models.conftest import stored_name

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc"),
]
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 16000, "hidden_size": 768,
    "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 12, "num_key_value_heads": 4,
    "head_dim": 64, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
}  # fmt: skip
# The peak counts from after a small conversion: imports and what they keep are no matter of the model's size.
CODE = """
import sys
import numpy as np
from certjax.models import checkpoints, convert
checkpoints.save(sys.argv[1] + ".small", {"w": np.ones((4, 4), np.float32)}, {}, None, {}, overwrite=True)
checkpoints.load(sys.argv[1] + ".small")
def status(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1]) * 1024
before = status("VmRSS")
if len(sys.argv) > 2:
    convert(sys.argv[2], sys.argv[1])
else:
    kept = checkpoints.load(sys.argv[1])
print(status("VmHWM") - before)
"""


def write_safetensors(folder, tensors, dtype):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file({name: tensor.astype(dtype) for name, tensor in tensors.items()}, folder / "model.safetensors")


def write_gguf(path, tensors, kind):
    writer = GGUFWriter(path, "llama")
    for key, name in (
        ("block_count", "num_hidden_layers"), ("context_length", "max_position_embeddings"),
        ("embedding_length", "hidden_size"), ("feed_forward_length", "intermediate_size"),
        ("attention.head_count", "num_attention_heads"), ("attention.head_count_kv", "num_key_value_heads"),
    ):  # fmt: skip
        writer.add_uint32(f"llama.{key}", CONFIG[name])
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", CONFIG["rms_norm_eps"])
    for name, tensor in tensors.items():
        stored = kind if tensor.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(stored_name(name), quants.quantize(tensor, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("write", "kind"),
    [
        (write_safetensors, np.float32),
        (write_safetensors, ml_dtypes.bfloat16),
        (write_gguf, GGMLQuantizationType.F32),
        (write_gguf, GGMLQuantizationType.Q8_0),
    ],
)
def test_peak(tmp_path, write, kind):
    rng = np.random.default_rng(0)
    table = tensor_table(LlamaConfig.from_hf(CONFIG))
    tensors = {name: rng.standard_normal(shape, np.float32) for name, (_, shape, _) in table.items()}
    size = sum(tensor.nbytes for tensor in tensors.values())
    assert size > 250e6
    write(tmp_path / "source", tensors, kind)
    del tensors
    for arguments in ([tmp_path / "model", tmp_path / "source"], [tmp_path / "model"]):
        done = subprocess.run([sys.executable, "-c", CODE, *arguments], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert size < int(done.stdout) < 1.3 * size, int(done.stdout) / size
