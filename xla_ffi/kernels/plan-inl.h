// Plan of a certified step: what the scan and the window say about thresholds, once for all levels.
// The definition is certjax/reference.py and certjax/estimator.py.
#ifndef CERTJAX_KERNELS_PLAN_INL_H_
#define CERTJAX_KERNELS_PLAN_INL_H_

#include "kernels/scan-inl.h"

namespace certjax {
namespace {

constexpr double kHalfLn2 = 0.34657359027997264;
constexpr double kLn2 = 2 * kHalfLn2;

// acc[w] ← acc[w] + Σ_i weight[w][i] (value_i · per_unit − center) for 16 · chunks channels from c
// on.
template <typename T, int weights, int chunks>
inline void AddCentered(const Tile<T>& values, int n, int c, int head_dim,
                        const float (*weight)[kLanes], const float* center, float per_unit,
                        float* acc) {
  F32x16 sum[weights][chunks];
  F32x16 middle[chunks];
  for (int j = 0; j < chunks; ++j) {
    middle[j] = Load(center + c + j * kLanes);
    for (int w = 0; w < weights; ++w) sum[w][j] = Set1(0.0f);
  }
  const F32x16 scale = Set1(per_unit);
  for (int i = 0; i < n; ++i) {
    F32x16 y[chunks];
    for (int j = 0; j < chunks; ++j) {
      y[j] = Sub(Mul(Load(values.row[i] + c + j * kLanes), scale), middle[j]);
    }
    for (int w = 0; w < weights; ++w) {
      const F32x16 x = Set1(weight[w][i]);
      for (int j = 0; j < chunks; ++j) sum[w][j] = Fma(x, y[j], sum[w][j]);
    }
  }
  for (int w = 0; w < weights; ++w) {
    for (int j = 0; j < chunks; ++j) {
      float* p = acc + w * head_dim + c + j * kLanes;
      Store(p, Add(Load(p), sum[w][j]));
    }
  }
}

template <typename T, int weights>
inline void TileCentered(const Tile<T>& values, int n, int head_dim, const float (*weight)[kLanes],
                         const float* center, float per_unit, float* acc) {
  constexpr int kChunks = kAccumulators / weights;
  int c = 0;
  for (; c + kChunks * kLanes <= head_dim; c += kChunks * kLanes) {
    AddCentered<T, weights, kChunks>(values, n, c, head_dim, weight, center, per_unit, acc);
  }
  for (; c < head_dim; c += kLanes) {
    AddCentered<T, weights, 1>(values, n, c, head_dim, weight, center, per_unit, acc);
  }
}

// ‖v‖² of 16 rows, in units.
template <typename T>
inline F32x16 TileSquares(const Tile<T>& values, const Tile<T>* ahead, int head_dim,
                          float per_unit) {
  float folded[kLanes * 8];
  const F32x16 scale = Set1(per_unit);
  for (int i = 0; i < kLanes; ++i) {
    F32x16 sum = Set1(0.0f);
    for (int c = 0; c < head_dim; c += kLanes) {
      if (ahead) Prefetch<T, 1>(ahead->row[i] + c);
      const F32x16 v = Mul(Load(values.row[i] + c), scale);
      sum = Fma(v, v, sum);
    }
    StoreFolded(folded + 8 * i, sum);
  }
  return SumFolded(folded);
}

// Points a tile at keys[0 … n), 1 ≤ n; lanes beyond repeat the last.
template <typename T>
inline void PointAt(const void* data, const int32_t* keys, int64_t n, int head_dim, Tile<T>* tile) {
  for (int j = 0; j < kLanes; ++j) {
    tile->row[j] = static_cast<const T*>(data) + int64_t{keys[j < n ? j : n - 1]} * head_dim;
  }
}

constexpr int kDeep = 3;  // levels ahead that candidates are collected for

inline void SetLevel(LevelState& s, int level, float first_size, float reference) {
  const float log_mass = Log(s.mass > kTiny ? s.mass : kTiny) - Log(first_size);
  s.level = level;
  s.log_tau = log_mass - static_cast<float>(level) * static_cast<float>(kHalfLn2);
  // Relative to what the bounds are relative to; the slack covers all roundings before it.
  const float magnitude =
      __builtin_fabsf(s.c) + __builtin_fabsf(reference) + __builtin_fabsf(s.log_tau) + 64.0f;
  s.filter = s.log_tau + (s.c - reference) - 1e-6f * magnitude;
  s.deep = s.filter - kDeep * static_cast<float>(kHalfLn2);
}

inline float FirstSize(float epsilon) {
  const float m = 0.3f / (epsilon * epsilon);
  return m > 16.0f ? m : 16.0f;
}

// Expected sample of a level, at most: level_size of estimator.py.
inline float LevelSize(int level, float epsilon) {
  return FirstSize(epsilon) * __builtin_exp2f(0.5f * static_cast<float>(level));
}

// Merges the chunks: reference c, sizes, predictions, window sums, first level.
template <typename T>
void RunPlan(CertifiedHead& a, const float* hint) {
  const int G = a.group;
  const int H = a.head_dim;
  const int64_t chunks = Chunks(a);
  const int64_t window = WindowKeys(a);
  float size_max = 0.0f, size_min = kInf;
  for (int64_t k = 0; k < chunks; ++k) {
    size_max = a.chunk[k].size_max > size_max ? a.chunk[k].size_max : size_max;
    size_min = a.chunk[k].size_min < size_min ? a.chunk[k].size_min : size_min;
  }
  const float widest = size_max > a.window_size_max ? size_max : a.window_size_max;
  a.unit = UnitAbove(double{widest} + a.center_norm);
  const float per_unit = static_cast<float>(1 / a.unit);
  for (int c = 0; c < H; ++c) {
    a.lane_center[c - c % kLanes + LaneOf<T>(c % kLanes)] = a.value_center[c] * per_unit;
  }
  for (int64_t i = 0; i < window; i += kLanes) {
    const int n = window - i < kLanes ? static_cast<int>(window - i) : kLanes;
    float lanes[kLanes];
    Store(lanes, TileSquares<T>(WindowTile<T>(a, a.value, i, n), nullptr, H, per_unit));
    memcpy(a.window_square + i, lanes, n * sizeof(float));
  }

  for (int g = 0; g < G; ++g) {
    LevelState& s = a.state[g];
    float top = window > 0 ? 0.0f : -kInf;
    for (int64_t k = 0; k < chunks; ++k) {
      const float lower = a.chunk[k].head[g].lower;
      top = lower > top ? lower : top;
    }
    s.top = top;
    s.c = a.reference[g] + top;
    double mass = 0.0, second = 0.0, squares = 0.0;
    for (int64_t k = 0; k < chunks; ++k) {
      const ScanSums& x = a.chunk[k].head[g];
      const double weight = __builtin_exp(double{x.lower} - double{top});
      const double unit = a.chunk[k].unit / a.unit;
      mass += weight * x.mass;
      second += weight * x.second * (unit * unit);
      squares += weight * x.squares * (unit * unit);
    }
    if (a.promise.measure == kDenominator) {  // z = w: sizes √(0 + 1)
      s.offset = 1.0f;
      s.mass = static_cast<float>(mass);
      s.scan = MergeScan(a, g);
    } else {
      const double square = second / (mass > kTiny ? mass : kTiny);
      const double largest = double{size_max} * per_unit;
      double offset = __builtin_sqrt(0.5 * square);
      const double least = 1e-4 * largest > 1e-12 ? 1e-4 * largest : 1e-12;
      if (!(offset > least)) offset = least;
      s.offset = static_cast<float>(offset);
      s.mass = static_cast<float>(mass * __builtin_sqrt(square + offset * offset));
    }
    // The window: level-independent, so summed once.
    s.window_mass = 0.0;
    double window_squares = 0.0;
    float* score = a.window_score + g * window;
    for (int64_t i = 0; i < window; ++i) {
      score[i] = Exp(score[i] - s.c);  // from here on the weight
      s.window_mass += score[i];
      window_squares += double{score[i]} * a.window_square[i];
    }
    const double denominator = mass + s.window_mass;
    s.predicted = static_cast<float>(denominator);
    s.scale_squared = static_cast<float>((squares + window_squares) /
                                         (denominator > kTiny ? denominator : kTiny));
    const float cap = 4.0f * s.scale_squared > kTiny ? 4.0f * s.scale_squared : kTiny;
    s.window_hat = 0.0;
    for (int64_t i = 0; i < window; ++i) {
      const double capped = double{a.window_square[i]} / cap;
      s.window_hat += score[i] * (capped < 1.0 ? capped : 1.0);
    }
    for (int x = 0; x < H; ++x) a.window_first[g * H + x] = 0.0;
    for (int64_t i = 0; i < window; i += kLanes) {
      const int n = window - i < kLanes ? static_cast<int>(window - i) : kLanes;
      float weight[1][kLanes];
      memcpy(weight[0], score + i, n * sizeof(float));
      float acc[kMaxHeadDim] = {};
      TileCentered<T, 1>(WindowTile<T>(a, a.value, i, n), n, H, weight, a.lane_center, per_unit,
                         acc);
      for (int x = 0; x < H; ++x) a.window_first[g * H + x] += acc[x];
    }

    const float size_least = size_min * per_unit;
    s.size_max = size_max * per_unit;
    s.size_min = __builtin_sqrtf(size_least * size_least + s.offset * s.offset);
    s.radius = widest * per_unit;
    double length = 0.0;
    for (int c = 0; c < H; ++c) length += double{a.query[g * H + c]} * a.query[g * H + c];
    const double products = __builtin_sqrt(length) * a.key_norm_max;
    s.rounding = static_cast<float>(Rounding(a, products));
    s.center_rounding = static_cast<float>(2 * SumsRounding(a) * a.center_norm * per_unit);
    const float epsilon = a.promise.epsilon;
    s.certified = false;
    // Beyond this the bounds of the scan might overflow.
    const bool tame = products < 1e30 && s.mass > 0.0f && s.mass < kInf && s.scale_squared < kInf &&
                      __builtin_fabsf(s.c) < 1e30f && __builtin_fabsf(a.reference[g]) < 1e30f;
    s.running = tame && a.levels > 0 && epsilon - s.rounding >= epsilon / 2;
    s.bound = s.scale_lower = s.denominator = 0.0f;
    s.keys = 0;
    s.covered = kInf;
    const float wanted = __builtin_rintf(hint[g] - 1.0f);
    const int last = a.levels - 1;
    int start = 0;
    if (wanted > 0.0f && wanted < kInf) start = wanted < last ? static_cast<int>(wanted) : last;
    SetLevel(s, start < 0 ? 0 : start, FirstSize(epsilon), a.reference[g]);
    s.sufficient = s.running ? static_cast<float>(s.level) : -1.0f;
    s.expected = s.running ? LevelSize(s.level, epsilon) : 0.0f;
  }
  for (int64_t k = 0; k < chunks; ++k) a.entries[k] = a.later[k] = 0;
}

}  // namespace
}  // namespace certjax

#endif  // CERTJAX_KERNELS_PLAN_INL_H_
