// Dense attention of one decode step. Included after one of the lanes_*-inl.h.
//
// Keys are taken in tiles of 16, so that key and value pages alternate every few kilobytes and both
// hardware streams stay alive (measured: 1.15 to 1.4 times faster than tiles of 64). Both are
// prefetched far ahead, a few lines with every key: all at once they would queue up (measured on
// Zen 4).
#ifndef CERTJAX_KERNELS_DENSE_DECODE_INL_H_
#define CERTJAX_KERNELS_DENSE_DECODE_INL_H_

#include "kernels/math-inl.h"

namespace certjax {
namespace {

// Lane of element j of sixteen, after Load(const T*).
template <typename T>
inline int LaneOf(int j) {
  return j;
}
template <>
inline int LaneOf<Bf16>(int j) {
  return (j & 1) * 8 + j / 2;
}

// Brings 16 · chunks elements from p on into the L2 cache; harmless at any address. Into L1, keys
// and values that come next would each displace what is in use (Zen 4: up to 1.5 times slower).
template <typename T, int chunks>
inline void Prefetch(const T* p) {
  constexpr int kLine = 64 / sizeof(T);
  for (int x = 0; x < chunks * kLanes; x += kLine) __builtin_prefetch(p + x, 0, 2);
}

// Elements between what dense attention uses and what it prefetches: 16 KiB.
template <typename T>
constexpr int kFar = 16384 / sizeof(T);

template <int n>
struct Count {
  static constexpr int value = n;
};

// Calls fn(Count<heads>, g) for heads g … g + heads − 1 at a time, as many as registers allow.
template <typename Fn>
inline void ByHeads(int group, Fn fn) {
  int g = 0;
  if constexpr (kHeads == 4) {
    for (; g + 4 <= group; g += 4) fn(Count<4>(), g);
    if (g + 3 == group) {
      fn(Count<3>(), g);
      return;
    }
  }
  for (; g + 2 <= group; g += 2) fn(Count<2>(), g);
  if (g < group) fn(Count<1>(), g);
}

// Sixteen rows anywhere.
template <typename T>
struct Tile {
  const T* row[kLanes];

  // Rows from `start` on; those from n on repeat the last.
  void Point(const void* data, int64_t start, int64_t n, int64_t head_dim) {
    for (int i = 0; i < kLanes; ++i) {
      const int64_t at = start + i < n ? start + i : n - 1;
      row[i] = static_cast<const T*>(data) + at * head_dim;
    }
  }
  const T* operator[](int i) const { return row[i]; }
};

// Sixteen rows that follow each other.
template <typename T>
struct Rows {
  const T* first;
  int64_t head_dim;

  const T* operator[](int i) const { return first + i * head_dim; }
};

// Scores of a tile for `heads` heads. kKeys · heads accumulators hide the latency of the additions,
// and every load of the query serves kKeys of them. Prefetches what is `on` elements beyond the
// rows of `ahead`.
template <typename T, int heads, typename Keys>
inline void TileScores(const float* query, const Keys& keys, const Keys* ahead, int64_t on,
                       int head_dim, F32x16* score) {
  constexpr int kKeys = kHeads == 4 ? (heads <= 2 ? 8 : 4) : kAccumulators / heads;
  float folded[heads][kLanes * 8];
  for (int i = 0; i < kLanes; i += kKeys) {
    F32x16 sum[kKeys][heads];  // the loops over it must unroll whole, or it lives in memory
    for (int k = 0; k < kKeys; ++k) {
      for (int g = 0; g < heads; ++g) sum[k][g] = Set1(0.0f);
    }
    const auto add = [&](int c) __attribute__((always_inline)) {
      F32x16 key[kKeys];
      for (int k = 0; k < kKeys; ++k) key[k] = Load(keys[i + k] + c);
      for (int g = 0; g < heads; ++g) {
        const F32x16 q = Load(query + g * head_dim + c);
        for (int k = 0; k < kKeys; ++k) sum[k][g] = Fma(q, key[k], sum[k][g]);
      }
    };
    int c = 0;
    for (; c + 4 * kLanes <= head_dim; c += 4 * kLanes) {  // few enough turns to be predicted
      for (int k = 0; ahead && k < kKeys; ++k) Prefetch<T, 4>((*ahead)[i + k] + on + c);
      add(c);
      add(c + kLanes);
      add(c + 2 * kLanes);
      add(c + 3 * kLanes);
    }
    for (; c < head_dim; c += kLanes) {
      for (int k = 0; ahead && k < kKeys; ++k) Prefetch<T, 1>((*ahead)[i + k] + on + c);
      add(c);
    }
    for (int k = 0; k < kKeys; ++k) {
      for (int g = 0; g < heads; ++g) StoreFolded(&folded[g][(i + k) * 8], sum[k][g]);
    }
  }
  for (int g = 0; g < heads; ++g) score[g] = SumFolded(folded[g]);
}

// acc[g] ← acc[g] · decay[g] + Σ_i weight[g][i] value_i over the n keys of a tile, for `heads`
// heads and 16 · chunks channels from c on.
template <typename T, int heads, int chunks>
inline void AddValues(const Rows<T>& values, bool ahead, int n, int c, int head_dim,
                      const float (*weight)[kLanes], const float* decay, float* acc) {
  F32x16 sum[heads][chunks];
  for (int g = 0; g < heads; ++g) {
    for (int j = 0; j < chunks; ++j) sum[g][j] = Set1(0.0f);
  }
  for (int i = 0; i < n; ++i) {
    if (ahead) Prefetch<T, chunks>(values[i] + kFar<T> + c);
    F32x16 value[chunks];
    for (int j = 0; j < chunks; ++j) value[j] = Load(values[i] + c + j * kLanes);
    for (int g = 0; g < heads; ++g) {
      const F32x16 w = Set1(weight[g][i]);
      for (int j = 0; j < chunks; ++j) sum[g][j] = Fma(w, value[j], sum[g][j]);
    }
  }
  for (int g = 0; g < heads; ++g) {
    const F32x16 d = Set1(decay[g]);
    for (int j = 0; j < chunks; ++j) {
      float* a = acc + g * head_dim + c + j * kLanes;
      Store(a, Fma(Load(a), d, sum[g][j]));
    }
  }
}

template <typename T, int heads>
inline void TileValues(const Rows<T>& values, bool ahead, int n, int head_dim,
                       const float (*weight)[kLanes], const float* decay, float* acc) {
  constexpr int kChunks = heads == 1 || kHeads == 4 ? 4 : kAccumulators / heads;
  int c = 0;
  for (; c + kChunks * kLanes <= head_dim; c += kChunks * kLanes) {
    AddValues<T, heads, kChunks>(values, ahead, n, c, head_dim, weight, decay, acc);
  }
  for (; c < head_dim; c += kLanes) {
    AddValues<T, heads, 1>(values, ahead, n, c, head_dim, weight, decay, acc);
  }
}

template <typename T>
void RunDenseChunk(const DenseChunk& a) {
  const int H = a.head_dim;
  const int G = a.group;
  float query[kMaxGroup * kMaxHeadDim];  // in lane order
  for (int x = 0; x < G * H; ++x) {
    const int j = x % kLanes;
    query[x - j + LaneOf<T>(j)] = a.query[x];
  }
  F32x16 sum[kMaxGroup];
  float peak[kMaxGroup];
  for (int g = 0; g < G; ++g) {
    sum[g] = Set1(0.0f);
    peak[g] = -kInf;
  }
  for (int x = 0; x < G * H; ++x) a.acc[x] = 0.0f;

  float weight[kMaxGroup][kLanes];
  float decay[kMaxGroup];
  F32x16 score[kMaxGroup];
  T tail[kLanes * kMaxHeadDim];
  for (int64_t start = 0; start < a.n; start += kLanes) {
    const int n = a.n - start < kLanes ? static_cast<int>(a.n - start) : kLanes;
    Rows<T> keys = {static_cast<const T*>(a.key) + start * H, H};
    Rows<T> values = {static_cast<const T*>(a.value) + start * H, H};
    if (n < kLanes) {  // rows beyond the last one are never read
      memcpy(tail, keys.first, n * H * sizeof(T));
      memset(tail + n * H, 0, (kLanes - n) * H * sizeof(T));
      keys.first = tail;
    }
    ByHeads(G, [&](auto heads, int g) {
      TileScores<T, heads.value>(query + g * H, keys, g == 0 ? &keys : nullptr, kFar<T>, H,
                                 score + g);
    });
    for (int g = 0; g < G; ++g) {
      if (n < kLanes) {  // the rows beyond count for nothing
        float lanes[kLanes];
        Store(lanes, score[g]);
        for (int i = n; i < kLanes; ++i) lanes[i] = -kInf;
        score[g] = Load(lanes);
      }
      const float top = MaxLanes(score[g]);
      decay[g] = 1.0f;
      if (top > peak[g]) {
        decay[g] = Exp(peak[g] - top);
        peak[g] = top;
      }
      const F32x16 w = Exp(Sub(score[g], Set1(peak[g])));
      Store(weight[g], w);
      sum[g] = Fma(sum[g], Set1(decay[g]), w);
    }

    ByHeads(G, [&](auto heads, int g) {
      TileValues<T, heads.value>(values, g == 0, n, H, weight + g, decay + g, a.acc + g * H);
    });
  }
  float folded[kLanes * 8] = {};
  for (int g = 0; g < G; ++g) {
    StoreFolded(folded, sum[g]);
    float lanes[kLanes];
    Store(lanes, SumFolded(folded));
    a.state[2 * g] = peak[g];
    a.state[2 * g + 1] = lanes[0];
  }
}

// Which NaN comes out of an addition depends on the instruction: make it always the same.
inline float OneNan(float x) { return x == x ? x : __builtin_nanf(""); }

template <typename T>
void RunDenseMerge(const DenseMerge& a) {
  const int H = a.head_dim;
  for (int g = 0; g < a.group; ++g) {
    float peak = -kInf;
    for (int64_t c = 0; c < a.chunks; ++c) {
      const float m = a.state[2 * (c * a.group + g)];
      if (!(m <= peak)) peak = m;  // NaN wins
    }
    double total = 0.0;
    double sum[kMaxHeadDim] = {};
    for (int64_t c = 0; c < a.chunks; ++c) {
      const int64_t at = c * a.group + g;
      const double w = Exp(a.state[2 * at] - peak);
      total += w * a.state[2 * at + 1];
      const float* acc = a.acc + at * H;
      for (int x = 0; x < H; ++x) sum[x] += w * acc[x];
    }
    for (int x = 0; x < H; ++x) {
      const int j = x % kLanes;
      const double s = sum[x - j + LaneOf<T>(j)];
      a.out[g * H + x] = a.chunks == 0 ? 0.0f : OneNan(static_cast<float>(s / total));
    }
    a.log_normalizer[g] = OneNan(peak + static_cast<float>(__builtin_log(total)));
  }
}

}  // namespace
}  // namespace certjax

#endif  // CERTJAX_KERNELS_DENSE_DECODE_INL_H_
