"""What `certjax demo` prints: dense and certified side by side, and what was certified."""

import numpy as np

import certjax
from certjax import isa
from certjax.models.llama import GenerateResult


def summary(
    certified: GenerateResult, dense: GenerateResult, replayed: GenerateResult, delta: float
) -> dict[str, float]:
    """The numbers that the statistics of three generations of one row from one prefill give.

    Args:
      certified: with certified attention.
      dense: with dense attention.
      replayed: with `audited_attention`, fewer tokens.
      delta: of a single attention call.
    """
    stats = {name: np.asarray(x) for name, x in certified.statistics.items()}
    exactly = {name: np.asarray(x) for name, x in dense.statistics.items()}
    sampled = stats["certified"] & ~stats["exact"]
    keys = stats["keys_read"]
    over = np.asarray(replayed.statistics["error_over_epsilon"])
    return {
        "new_tokens": certified.tokens.shape[1],
        "head_steps": sampled.size,
        "sampled_share": float(sampled.mean()),
        "exact_share": float(stats["exact"].mean()),
        "uncertified": int((~stats["certified"]).sum()),
        "keys_mean": float(keys.mean()),
        "keys_p90": float(np.percentile(keys, 90)),
        "keys_median": float(np.median(keys)),
        "keys_sampled": float(keys[sampled].mean()) if sampled.any() else 0.0,
        "pool": round(float(exactly["keys_read"].mean())),  # dense reads all of it
        "bytes_per_token": float(stats["bytes_read"].sum() / len(keys)),
        "dense_bytes_per_token": float(exactly["bytes_read"].sum() / len(keys)),
        # Every call: which heads came out exact depends on the perturbations that their errors depend on.
        "delta_spent": certjax.delta_spent(delta, calls=sampled.size),
        "same_tokens": int((np.asarray(certified.tokens) == np.asarray(dense.tokens)).cumprod(-1).sum()),
        "replayed_steps": over.shape[0],
        "replayed_head_steps": int((over > 0).sum()),
        "largest_error_over_epsilon": float(over.max()),
        "violations": int((over > 1).sum()),
    }


def show(n: dict[str, float], epsilon: float, delta_total: float) -> None:
    """Prints the table of `summary`'s numbers and the times.

    Args:
      n: the numbers that `certjax.eval.demo.run` returns.
      epsilon: allowed error relative to M.
      delta_total: δ over the generation.
    """
    implementation = certjax.choose_implementation()
    if implementation == "native":
        implementation += f" implementation on {isa.active()}"
    columns = {
        "decode, tokens/s": (n["dense_tokens_per_s"], n["certified_tokens_per_s"], ".2f"),
        "CPU ms a token": (n["dense_cpu_ms"], n["certified_cpu_ms"], ".1f"),
        "attention reads, MB a token": (n["dense_bytes_per_token"] / 1e6, n["bytes_per_token"] / 1e6, ".1f"),
        "pool keys read a head": (n["pool"], n["keys_mean"], ".0f"),
    }
    rows = {
        "document": "{context} tokens, then {new_tokens} generated{scaling}",
        "prefill (exact)": "{prefill_tokens_per_s:.0f} tokens/s{prefill_source}",
        "times": "medians of {timed_steps} streamed steps each, whole generations in turn, compilation left out",
        "reads": "metadata, keys, values: counted by a model, not measured",
        "head-steps": "{head_steps}: {sampled_share:.1%} sampled and certified, {exact_share:.1%} exact, "
        "{uncertified} without certificate",
        "": "exact: where dense attention costs less than sampling, or no level certified",
        "pool keys read": "mean {keys_sampled:.0f} where sampled; of all heads median {keys_median:.0f}, "
        "p90 {keys_p90:.0f} of a pool of {pool}",
        "δ spent": "{delta_spent:.2g} of {delta_total:.2g} in all",
        "same tokens as dense": "the first {same_tokens} of {new_tokens}",
        "replay against dense": "{replayed_steps} steps, {replayed_head_steps} sampled head-steps: "
        "largest error {largest_error_over_epsilon:.3f} ε, {violations} violations",
    }
    facts = n | {
        "delta_total": delta_total,
        "prefill_source": " (then kept in a file, now read from it)" if n["prefill_kept"] else "",
        "scaling": f"; positions scaled: YaRN, {n['stretch']:.3g} × the trained {n['trained']}"
        if n["stretch"] > 1
        else "",
    }
    width = max(map(len, [*columns, *rows]))
    print(f"\nε = {epsilon} (value measure: ‖ô − o‖ ≤ ε M), {implementation}")
    print(f"  {'':<{width}}  {'dense':>9}  {'certified':>9}  {'ratio':>6}")
    for name, (dense, certified, form) in columns.items():
        print(f"  {name:<{width}}  {dense:>9{form}}  {certified:>9{form}}  {certified / max(dense, 1e-30):>6.2f}")
    for name, text in rows.items():
        print(f"  {name:<{width}}  {text.format(**facts)}")
