"""Real attention inputs for `certjax bench`: keys, values and queries of a model that reads a document."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import certjax
from certjax.eval import loading
from certjax.eval.bench_inputs import POSITIONS, Case, split_heads
from certjax.eval.demo import read_text
from certjax.eval.progress import Progress
from certjax.models.llama import LlamaConfig, load_model, prefill

RECORDED = 2 * POSITIONS  # newest positions whose queries are kept


def model_cases(checkpoint: str, prompt_file: str | None, sizes: list[int]) -> tuple[list[Case], list[str]]:
    """One case a size: the kv heads of the first, the middle and the last layer after reading n tokens of a document.

    The document is read once; before every size the last tokens are fed one by one, which gives their queries.

    Args:
      checkpoint: folder made by `certjax convert`, with a tokenizer.
      prompt_file: UTF-8 text; None for the language reference that every CPython carries.
      sizes: n, tokens.

    Returns:
      The cases, and a line for every size that the document or the model is too short for.

    Raises:
      ValueError: a checkpoint or text that is missing or cannot be used.
    """
    text, source = read_text(prompt_file)
    loaded, tokenizer = loading.load(checkpoint)
    ids = tokenizer.encode(text)
    config = LlamaConfig.from_hf(loaded.config)
    model = load_model(loaded.params, config, attention=_recording)
    del loaded
    longest = min(len(ids), config.max_positions)
    skipped = [
        f"real, n {n}: {source} has {len(ids)} tokens and the model's longest context is {config.max_positions}"
        for n in sorted(sizes)
        if n > longest
    ]
    sizes = sorted(n for n in sizes if n <= longest)
    if not sizes:
        return [], skipped
    layers = sorted({0, config.num_layers // 2, config.num_layers - 1})
    weights, structure = jax.tree.flatten(model)

    def step(weights, token, caches):
        model = jax.tree.unflatten(structure, weights)
        _, caches, _, metrics = model.decode_step(
            token, caches, model.init_hints(1), rng=jax.random.key(0), config=certjax.Config()
        )
        return caches, metrics["query"][np.asarray(layers), 0]

    step = jax.jit(step, donate_argnums=2)
    caches = model.init_caches(1, sizes[-1], jnp.bfloat16)
    cases, done = [], 0
    with Progress("real caches: prefill", "tokens") as progress:
        for n in sizes:
            part = ids[done : n - RECORDED]
            if part:
                report = lambda now, _, done=done: progress(done + now, sizes[-1])
                _, caches = prefill(model, [part], caches, progress=report)
            queries = []
            for token in ids[max(done, n - RECORDED) : n]:
                caches, query = step(weights, jnp.full((1,), token, jnp.int32), caches)
                queries.append(np.asarray(query))
            done = n
            query = np.stack(queries, 2)  # [layers, N, T, H]
            # Copies: the next step donates the buffers.
            rows = [
                (_stored(caches[layer].key, n), _stored(caches[layer].value, n), query[i])
                for i, layer in enumerate(layers)
            ]
            cases.append(_case(f"layers {', '.join(map(str, layers))}, {source}", rows))
    return cases, skipped


def _case(source: str, rows: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> Case:
    K, n, d = rows[0][0].shape
    load = lambda: (head for layer in rows for head in split_heads(*layer))
    return Case("real", source, n, d, rows[0][2].shape[0] // K, K * len(rows), load)


def _stored(bits: jax.Array, n: int) -> np.ndarray:
    return np.array(bits[0, :, :n]).view(ml_dtypes.bfloat16)


def _recording(query, cache, *, rng, hint, config):
    """Dense attention that reports its queries."""
    del rng, hint
    return certjax.dense_decode_attention(query, cache, config=config), {"query": query[:, 0]}
