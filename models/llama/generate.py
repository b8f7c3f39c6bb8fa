"""Text generation as one compiled program: a while loop over tokens, layers unrolled, caches updated in place."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import certjax
from certjax.models.llama.modeling import Caches, Hints, Llama, Metrics
from certjax.models.llama.prefill import check_room, pack_prompts, prefill
from certjax.models.llama.sampling import sample

NO_TOKEN = -1

Stream = Callable[[int, np.ndarray], None]
_Told = tuple[jax.Array, jax.Array]  # int32 tokens [B] of the newest step, bool [B]: rows that have ended


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class GenerateResult:
    """What was generated, and what every attention call reported.

    Attributes:
      tokens: int32 [B, max_new_tokens]; −1 behind the end of a row. An end token is kept.
      lengths: int32 [B], tokens of each row, the end token included.
      statistics: arrays [max_new_tokens − 1, L, B, N]: `certified`, `exact`, `keys_read`, `candidates`, `bytes_read`
        (see `certjax.Certificate`), and what a custom attention added. Entry t belongs to the step that was fed token t
        of the row; it is zero for t ≥ lengths − 1, where the row took no step.
    """

    tokens: jax.Array
    lengths: jax.Array
    statistics: Metrics


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class _State:
    """What the loop carries. `count` [B] doubles as the lengths; `step` is the number of tokens chosen so far."""

    step: jax.Array
    done: jax.Array
    token: jax.Array
    tokens: jax.Array
    count: jax.Array
    caches: Caches
    hints: Hints
    statistics: Metrics


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class _Options:
    """What may differ between calls without compiling again, but for None against a value, and `top_k`.

    The two keys are [B], one a row.
    """

    attention_rng: jax.Array
    sample_rng: jax.Array
    end_ids: jax.Array
    temperature: jax.Array | None
    top_p: jax.Array | None
    config: "certjax.Config"
    top_k: int | None = dataclasses.field(metadata={"static": True})


def generate(
    model: Llama,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    rng: jax.Array,
    end_ids: Iterable[int] = (),
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    certified_config: "certjax.Config | None" = None,
    delta_scope: Literal["call", "generation"] = "call",
    cache_dtype: Any = jnp.float32,
    chunk: int = 512,
    progress: Callable[[int, int], None] | None = None,
    stream: Stream | None = None,
) -> GenerateResult:
    """Continues prompts: `prefill`, then `decode`, with caches of just the size that is needed.

    Args:
      model: the model.
      prompts: B sequences of token ids; lengths may differ.
      max_new_tokens: generated at most, for each row.
      rng: key of everything random, the attention's perturbations included: one, into which the row's index is folded,
        or one a row, [B]. A row's key is its own: in another batch, or alone, the row draws the same, and has the same
        tokens but for what float32 rounding does to a tie (prefills of other shapes sum in another order), if δ is that
        of a call.
      end_ids: tokens that end a row; may be several.
      temperature: 0 for the most likely token each time.
      top_k: draw from that many most likely tokens; None for all. Another number compiles again.
      top_p: draw from the smallest set of most likely tokens of that probability; 1 for all.
      certified_config: replaces the model's; ε and δ may vary without compiling again.
      delta_scope: what its δ is for: "call", a single attention output (one query head of one layer, row and step), or
        "generation", all of them together: a call gets δ / (N · L · B · (max_new_tokens − 1)). The first token comes
        from the prefill, which is exact.
      cache_dtype: float32, bfloat16 or float16.
      chunk: see `prefill`.
      progress: see `prefill`.
      stream: see `decode`.

    Returns:
      The tokens and the statistics.

    Raises:
      ValueError: an empty prompt, ids outside the vocabulary, prompt and new tokens beyond the model's longest context,
        or an option out of range.
    """
    _, lengths = pack_prompts(prompts, model.config.vocab_size)
    options = _options(
        model, len(prompts), max_new_tokens, rng, end_ids, temperature, top_k, top_p, certified_config, delta_scope
    )
    longest = int(lengths.max())
    if longest + max_new_tokens > model.config.max_positions:
        raise ValueError(
            f"prompt of {longest} tokens and {max_new_tokens} new ones exceed the model's longest context of "
            f"{model.config.max_positions}; shorten the prompt or lower max_new_tokens"
        )
    caches = model.init_caches(len(prompts), longest + max_new_tokens, cache_dtype)
    logits, caches = prefill(model, prompts, caches, chunk=chunk, progress=progress)
    return _decode(model, logits, caches, options, max_new_tokens, stream)[0]


def decode(
    model: Llama,
    logits: jax.Array,
    caches: Caches,
    *,
    max_new_tokens: int,
    rng: jax.Array,
    end_ids: Iterable[int] = (),
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    certified_config: "certjax.Config | None" = None,
    delta_scope: Literal["call", "generation"] = "call",
    stream: Stream | None = None,
) -> tuple[GenerateResult, Caches]:
    """Generates after a prefill. Arguments that are not listed are those of `generate`.

    One program is compiled for a shape; it runs from any step to any other. Without `stream` a single call of it makes
    all tokens. With `stream` it is called once a token, the state staying on the device, and the callback is ordinary
    Python: it may block, print, raise, and use JAX. The next step is under way meanwhile.

    Args:
      model: the model.
      logits: [B, V] after the last prompt token, from `prefill`.
      caches: one a layer; donated. Copy them first to decode twice from one prefill.
      max_new_tokens: generated at most, for each row.
      rng: as for `generate`.
      end_ids: as for `generate`.
      temperature: as for `generate`.
      top_k: as for `generate`.
      top_p: as for `generate`.
      certified_config: as for `generate`.
      delta_scope: as for `generate`.
      stream: called after every token with its index and the int32 tokens [B] (−1 for rows that have ended). An
        exception that it raises ends the generation and reaches the caller.

    Returns:
      The tokens and statistics; the caches, which hold all tokens of a row but its last.

    Raises:
      ValueError: not enough room in caches or model, or an option out of range.
    """
    batch = logits.shape[0]
    options = _options(
        model, batch, max_new_tokens, rng, end_ids, temperature, top_k, top_p, certified_config, delta_scope
    )
    check_room(model, caches, np.full(batch, max_new_tokens - 1), what="the new ones")
    return _decode(model, logits, caches, options, max_new_tokens, stream)


def _decode(model, logits, caches, options, max_new_tokens, stream) -> tuple[GenerateResult, Caches]:
    model = model.with_attention(model.attention)  # its ε and δ are in the options: no other program for other values
    # Flattened once: at each call of a jitted function NNX walks all modules in Python, 5 ms for 30 layers.
    weights, structure = jax.tree.flatten(model)
    state, told = _begin(structure, weights, logits, caches, options, max_new_tokens=max_new_tokens)
    if stream is None:
        if max_new_tokens > 1:
            state, _ = _run(structure, weights, state, options, np.int32(max_new_tokens))
    else:
        for step in range(max_new_tokens):
            # Handing over hundreds of arrays takes the host milliseconds: done while the step before is computed.
            # A step after the last row's end does nothing.
            upcoming = None
            if step + 1 < max_new_tokens:
                state, upcoming = _run(structure, weights, state, options, np.int32(step + 2))
            token, done = told
            stream(step, np.asarray(token))
            if upcoming is None or np.asarray(done).all():
                break
            told = upcoming
    return GenerateResult(tokens=state.tokens, lengths=state.count, statistics=state.statistics), state.caches


def _options(
    model, batch, max_new_tokens, rng, end_ids, temperature, top_k, top_p, certified_config, delta_scope
) -> _Options:
    check_options(max_new_tokens, temperature, top_k, top_p, delta_scope)
    ends = np.asarray(sorted(end_ids), np.int32)
    vocab = model.config.vocab_size
    if ends.size and (ends[0] < 0 or ends[-1] >= vocab):
        raise ValueError(f"end_ids {ends.tolist()} must lie in the vocabulary 0 … {vocab - 1}")
    config = model.certified_config if certified_config is None else certified_config
    if delta_scope == "generation":
        calls = model.config.num_heads * model.config.num_layers * batch * max(max_new_tokens - 1, 1)
        config = dataclasses.replace(config, delta=config.delta / calls)
    keys = jax.vmap(jax.random.split)(_row_keys(rng, batch))
    return _Options(
        attention_rng=keys[:, 0],
        sample_rng=keys[:, 1],
        end_ids=jnp.asarray(ends),
        temperature=jnp.float32(temperature) if temperature else None,
        top_p=jnp.float32(top_p) if temperature and top_p < 1 else None,
        config=config,
        top_k=min(top_k, vocab) if temperature and top_k is not None else None,
    )


def check_options(max_new_tokens: int, temperature: float, top_k: int | None, top_p: float, delta_scope: str) -> None:
    """Raises ValueError for what `generate` would refuse whatever the model, before one is loaded."""
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be a positive integer, got {max_new_tokens!r}")
    if not (np.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature must be 0 (greedy) or positive, got {temperature!r}")
    if top_k is not None and (not isinstance(top_k, int) or top_k < 1):
        raise ValueError(f"top_k must be a positive integer or None, got {top_k!r}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must lie in (0, 1], got {top_p!r}")
    if delta_scope not in ("call", "generation"):
        raise ValueError(f'delta_scope must be "call" or "generation", got {delta_scope!r}')


def _row_keys(rng: jax.Array, batch: int) -> jax.Array:
    """One key a row, [B]."""
    if not jax.dtypes.issubdtype(jnp.result_type(rng), jax.dtypes.prng_key) or rng.shape not in ((), (batch,)):
        raise ValueError(
            f"rng must be a key made by jax.random.key, or one key a row, [{batch}]: got {jnp.result_type(rng)} "
            f"{jnp.shape(rng)}"
        )
    return rng if rng.shape else _fold_rows(rng, jnp.arange(batch))


_fold_rows = jax.vmap(jax.random.fold_in, in_axes=(None, 0))  # one key, B numbers
_fold_step = jax.vmap(jax.random.fold_in, in_axes=(0, None))  # B keys, one number


@functools.partial(jax.jit, static_argnames=("structure", "max_new_tokens"), donate_argnames=("caches",))
def _begin(
    structure, weights, logits, caches: Caches, options: _Options, *, max_new_tokens: int
) -> tuple[_State, _Told]:
    """Chooses the first token and makes empty buffers."""
    model: Llama = jax.tree.unflatten(structure, weights)
    B = logits.shape[0]
    hints = model.init_hints(B)
    # One layer tells which statistics there are; the others report the same.
    kv = jax.ShapeDtypeStruct((B, 1, model.config.num_kv_heads, model.config.head_dim), jnp.float32)
    q = jax.ShapeDtypeStruct((B, 1, model.config.num_heads, model.config.head_dim), jnp.float32)
    attend = functools.partial(model.attend, 0, caches[0], hints[0], options.attention_rng, options.config, None)
    _, (_, _, metrics) = jax.eval_shape(attend, q, kv, kv)
    buffers = {
        name: jnp.zeros((max_new_tokens - 1, model.config.num_layers, *x.shape), x.dtype) for name, x in metrics.items()
    }
    state = _State(
        step=jnp.int32(0),
        done=jnp.zeros((B,), bool),
        token=jnp.zeros((B,), jnp.int32),
        tokens=jnp.full((B, max_new_tokens), NO_TOKEN, jnp.int32),
        count=jnp.zeros((B,), jnp.int32),
        caches=caches,
        hints=hints,
        statistics=buffers,
    )
    return _telling(_choose(state, logits, options))


@functools.partial(jax.jit, static_argnames=("structure",), donate_argnames=("state",))
def _run(structure, weights, state: _State, options: _Options, limit: jax.Array) -> tuple[_State, _Told]:
    """Decodes until `limit` tokens are chosen or every row has ended."""
    model: Llama = jax.tree.unflatten(structure, weights)

    def unfinished(state):
        return (state.step < limit) & ~state.done.all()

    def body(state):
        rng = _fold_step(options.attention_rng, state.step)
        active = ~state.done
        logits, caches, hints, metrics = model.decode_step(
            jnp.maximum(state.token, 0), state.caches, state.hints, rng=rng, config=options.config, active=active
        )
        at = (state.step - 1, 0, 0, 0)
        statistics = {
            name: jax.lax.dynamic_update_slice(
                state.statistics[name], jnp.where(active[None, :, None], x, jnp.zeros((), x.dtype))[None], at
            )
            for name, x in metrics.items()
        }
        state = dataclasses.replace(state, caches=caches, hints=hints, statistics=statistics)
        return _choose(state, logits, options)

    return _telling(jax.lax.while_loop(unfinished, body, state))


def _telling(state: _State) -> tuple[_State, _Told]:
    """The state, and apart from it what the host wants to know: the state goes into the next call, which ends it."""
    return state, (state.token, state.done)


def _choose(state: _State, logits: jax.Array, options: _Options) -> _State:
    """Adds a token to every row that has not ended."""
    rng = _fold_step(options.sample_rng, state.step)
    token = sample(logits, rng, temperature=options.temperature, top_k=options.top_k, top_p=options.top_p)
    token = jnp.where(state.done, NO_TOKEN, token)
    return dataclasses.replace(
        state,
        step=state.step + 1,
        done=state.done | (token[:, None] == options.end_ids[None]).any(1),
        token=token,
        tokens=jax.lax.dynamic_update_slice(state.tokens, token[:, None], (0, state.step)),
        count=state.count + (~state.done).astype(jnp.int32),
    )
