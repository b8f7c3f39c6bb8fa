"""Dense attention in float64, what every implementation is held to."""

import numpy as np

from certjax.cache import from_storage


def dense64(query, cache, span=None):
    """(o, M, ln D) of row 0 in float64, heads first."""
    n = int(cache.length[0])
    lo = 0 if span is None else max(0, n - span)
    key, value = (np.asarray(from_storage(x, cache.dtype), np.float64)[0, :, lo:n] for x in (cache.key, cache.value))
    q = np.asarray(query, np.float64)[0, 0]
    N, K, H = len(q), key.shape[0], key.shape[2]
    out, scale, norm = np.zeros((N, H)), np.zeros(N), np.zeros(N)
    for h in range(N):
        s = key[h // (N // K)] @ q[h] / np.sqrt(H)
        w = np.exp(s - s.max())
        a = w / w.sum()
        v = value[h // (N // K)]
        out[h], scale[h], norm[h] = a @ v, np.sqrt(a @ (v * v).sum(-1)), s.max() + np.log(w.sum())
    return out, scale, norm
