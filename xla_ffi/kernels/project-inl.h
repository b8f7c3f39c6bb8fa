// Products of a few rows with a matrix of weights. Included after one of the lanes_*-inl.h.
//
// Bound by memory: what counts is that weights are read once, in order, in long runs. Measured on
// Zen 3: 4096 × 14336 bfloat16 in runs of 512, 2048 and 8192 columns reach 0.4, 0.75 and 1.0 of the
// speed of a plain read, so a task is a slab of whole rows; eight rows of weights at a time beat
// four and sixteen. Prefetching what comes next costs more than it gives, but where rows are short:
// 576 bfloat16 then reach 0.7 instead of 0.5.
#ifndef CERTJAX_KERNELS_PROJECT_INL_H_
#define CERTJAX_KERNELS_PROJECT_INL_H_

#include "kernels/dense_decode-inl.h"

namespace certjax {
namespace {

inline int64_t Padded(int64_t outputs) { return (outputs + kLanes - 1) / kLanes * kLanes; }

// Sixteen elements, lane j holds element j.
template <typename T>
inline F32x16 LoadInOrder(const T* p) {
  return Load(p);
}
inline F32x16 LoadInOrder(const Bf16* p) { return AsFloat(ShiftLeft<16>(LoadI(&p->bits))); }

constexpr int64_t kShortRow = 2560;  // bytes; transposed, of the inputs of an output

// out[r] ← out[r] + Σ_i x[r, i] weight[i] for `rows` rows, `count` inputs and 16 · chunks outputs
// in lane order.
template <typename T, int rows, int count, int chunks>
inline void AddInputs(const float* x, int64_t x_stride, const T* weight, int64_t weight_stride,
                      float* out, int64_t out_stride) {
  F32x16 sum[rows][chunks];  // the loops over it must unroll whole, or it lives in memory
  for (int r = 0; r < rows; ++r) {
    for (int j = 0; j < chunks; ++j) sum[r][j] = Set1(0.0f);
  }
#pragma GCC unroll 16
  for (int i = 0; i < count; ++i) {
    F32x16 w[chunks];
    for (int j = 0; j < chunks; ++j) w[j] = Load(weight + i * weight_stride + j * kLanes);
    for (int r = 0; r < rows; ++r) {
      const F32x16 factor = Set1(x[r * x_stride + i]);
      for (int j = 0; j < chunks; ++j) sum[r][j] = Fma(factor, w[j], sum[r][j]);
    }
  }
  for (int r = 0; r < rows; ++r) {
    for (int j = 0; j < chunks; ++j) {
      float* p = out + r * out_stride + j * kLanes;
      Store(p, Add(Load(p), sum[r][j]));
    }
  }
}

// Inputs i … i + count − 1 for rows r … r + rows − 1 and all outputs of the task.
template <typename T, int rows, int count>
inline void AddToRows(const ProjectTask& a, int64_t r, int64_t i) {
  constexpr int kChunks = kAccumulators / rows;
  const float* x = a.x + r * a.inputs + i;
  const T* weight = static_cast<const T*>(a.weight) + i * a.outputs;
  const int64_t stride = Padded(a.outputs);
  float* out = a.out + r * stride;
  const bool ahead = r == 0 && a.outputs * static_cast<int64_t>(sizeof(T)) <= kShortRow;
  const T* next = weight + count * a.outputs;  // fetched in the order of its addresses
  int64_t o = a.begin;
  for (; o + kChunks * kLanes <= a.end; o += kChunks * kLanes) {
    if (ahead) Prefetch<T, count * kChunks>(next + count * (o - a.begin));
    AddInputs<T, rows, count, kChunks>(x, a.inputs, weight + o, a.outputs, out + o, stride);
  }
  for (; o + kLanes <= a.end; o += kLanes) {
    AddInputs<T, rows, count, 1>(x, a.inputs, weight + o, a.outputs, out + o, stride);
  }
  if (o == a.end) return;
  T part[count * kLanes] = {};
  for (int k = 0; k < count; ++k) {
    memcpy(part + k * kLanes, weight + k * a.outputs + o, (a.end - o) * sizeof(T));
  }
  AddInputs<T, rows, count, 1>(x, a.inputs, part, kLanes, out + o, stride);
}

template <typename T, int count>
inline void AddToAll(const ProjectTask& a, int64_t i) {
  int64_t r = 0;
  for (; r + 4 <= a.rows; r += 4) AddToRows<T, 4, count>(a, r, i);
  for (; r + 2 <= a.rows; r += 2) AddToRows<T, 2, count>(a, r, i);
  if (r < a.rows) AddToRows<T, 1, count>(a, r, i);
}

// out[r, o] for rows r … r + rows − 1 and the n ≤ 16 outputs from o on, whose weights are `tile`.
template <typename T, int rows>
inline void DotRows(const ProjectTask& a, const Tile<T>& tile, int64_t r, int64_t o, int n) {
  constexpr int kOutputs = kAccumulators / rows;
  const float* x = a.x + r * a.inputs;
  const int64_t whole = a.inputs / kLanes * kLanes;
  const bool ahead = r == 0 && a.inputs * static_cast<int64_t>(sizeof(T)) <= kShortRow;
  float folded[rows][kLanes * 8];
  for (int k = 0; k < kLanes; k += kOutputs) {
    F32x16 sum[kOutputs][rows];  // as above
    for (int j = 0; j < kOutputs; ++j) {
#pragma GCC unroll 16
      for (int q = 0; q < rows; ++q) sum[j][q] = Set1(0.0f);
    }
    const T* next = tile.row[k] + kOutputs * a.inputs;
    for (int64_t i = 0; i < whole; i += kLanes) {
      if (ahead) Prefetch<T, kOutputs>(next + kOutputs * i);
      F32x16 w[kOutputs];
      for (int j = 0; j < kOutputs; ++j) w[j] = LoadInOrder(tile.row[k + j] + i);
#pragma GCC unroll 16
      for (int q = 0; q < rows; ++q) {
        const F32x16 factor = Load(x + q * a.inputs + i);
        for (int j = 0; j < kOutputs; ++j) sum[j][q] = Fma(factor, w[j], sum[j][q]);
      }
    }
    for (int j = 0; j < kOutputs; ++j) {
#pragma GCC unroll 16
      for (int q = 0; q < rows; ++q) StoreFolded(&folded[q][(k + j) * 8], sum[j][q]);
    }
  }
  for (int q = 0; q < rows; ++q) {
    float sum[kLanes];
    Store(sum, SumFolded(folded[q]));
    for (int k = 0; k < n; ++k) {
      for (int64_t i = whole; i < a.inputs; ++i) {
        sum[k] = __builtin_fmaf(x[q * a.inputs + i], ToF32(tile.row[k][i]), sum[k]);
      }
      a.out[(r + q) * a.outputs + o + k] = OneNan(sum[k]);
    }
  }
}

template <typename T>
void RunProject(const ProjectTask& a) {
  if (a.transposed) {
    Tile<T> tile;
    for (int64_t o = a.begin; o < a.end; o += kLanes) {
      const int n = a.end - o < kLanes ? static_cast<int>(a.end - o) : kLanes;
      tile.Point(a.weight, o, a.end, a.inputs);
      int64_t r = 0;
      for (; r + 4 <= a.rows; r += 4) DotRows<T, 4>(a, tile, r, o, n);
      for (; r + 2 <= a.rows; r += 2) DotRows<T, 2>(a, tile, r, o, n);
      if (r < a.rows) DotRows<T, 1>(a, tile, r, o, n);
    }
    return;
  }
  for (int64_t r = 0; r < a.rows; ++r) {
    float* out = a.out + r * Padded(a.outputs);
    for (int64_t o = a.begin; o < Padded(a.end); ++o) out[o] = 0.0f;
  }
  int64_t i = a.first;
  for (; i + 8 <= a.last; i += 8) AddToAll<T, 8>(a, i);
  for (; i < a.last; ++i) AddToAll<T, 1>(a, i);
}

template <typename T>
void RunProjectMerge(const ProjectMerge& a) {
  const int64_t stride = Padded(a.outputs);
  for (int64_t r = 0; r < a.rows; ++r) {
    float* total = a.sums + r * stride;
    for (int64_t s = 1; s < a.slabs; ++s) {
      const float* sums = total + s * a.rows * stride;
      for (int64_t o = a.begin; o < Padded(a.end); ++o) total[o] += sums[o];
    }
    for (int64_t o = a.begin; o < a.end; ++o) {
      const int64_t j = o % kLanes;
      a.out[r * a.outputs + o] = OneNan(total[o - j + LaneOf<T>(static_cast<int>(j))]);
    }
  }
}

}  // namespace
}  // namespace certjax

#endif  // CERTJAX_KERNELS_PROJECT_INL_H_
