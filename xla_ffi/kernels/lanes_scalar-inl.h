// Sixteen float lanes in plain C++: the definition that the other two lanes_*-inl.h follow.
#ifndef CERTJAX_KERNELS_LANES_SCALAR_INL_H_
#define CERTJAX_KERNELS_LANES_SCALAR_INL_H_

#include "kernels/convert-inl.h"

namespace certjax {
namespace {

constexpr int kAccumulators = 4;  // as in the AVX2 level; results do not depend on it

struct F32x16 {
  float lane[kLanes];
};

template <typename Fn>
inline F32x16 ForLanes(Fn fn) {
  F32x16 out;
  for (int j = 0; j < kLanes; ++j) out.lane[j] = fn(j);
  return out;
}

inline F32x16 Set1(float x) {
  return ForLanes([=](int) { return x; });
}
inline F32x16 Load(const float* p) {
  return ForLanes([=](int j) { return p[j]; });
}
inline F32x16 Load(const F16* p) {
  return ForLanes([=](int j) { return ToF32(p[j]); });
}
// Lanes 0 … 7 hold the even elements, lanes 8 … 15 the odd ones: a shift and a mask instead of a
// shuffle. LaneOf says where an element went.
inline F32x16 Load(const Bf16* p) {
  return ForLanes([=](int j) { return ToF32(p[j < 8 ? 2 * j : 2 * j - 15]); });
}
inline void Store(float* p, F32x16 a) { memcpy(p, a.lane, sizeof(a.lane)); }

inline F32x16 Fma(F32x16 a, F32x16 b, F32x16 c) {
  return ForLanes([&](int j) { return __builtin_fmaf(a.lane[j], b.lane[j], c.lane[j]); });
}
inline F32x16 Add(F32x16 a, F32x16 b) {
  return ForLanes([&](int j) { return a.lane[j] + b.lane[j]; });
}
inline F32x16 Sub(F32x16 a, F32x16 b) {
  return ForLanes([&](int j) { return a.lane[j] - b.lane[j]; });
}
inline F32x16 Mul(F32x16 a, F32x16 b) {
  return ForLanes([&](int j) { return a.lane[j] * b.lane[j]; });
}

// Largest lane; where NaN is involved, any lane.
inline float MaxLanes(F32x16 a) {
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int j = 0; j < width; ++j) {
      a.lane[j] = a.lane[j] > a.lane[j + width] ? a.lane[j] : a.lane[j + width];
    }
  }
  return a.lane[0];
}

// a · 2ⁿ, n the low bits of the float t = n + 1.5 · 2²³; the result must be normal.
inline F32x16 ScaleByExponent(F32x16 a, F32x16 t) {
  return ForLanes([&](int j) { return FromBits(ToBits(a.lane[j]) + (ToBits(t.lane[j]) << 23)); });
}

// 0 where x < limit, else a.
inline F32x16 ZeroBelow(F32x16 x, float limit, F32x16 a) {
  return ForLanes([&](int j) { return x.lane[j] < limit ? 0.0f : a.lane[j]; });
}

// Eight floats, lane j + lane j + 8: the first step of a sum over lanes.
inline void StoreFolded(float* p, F32x16 a) {
  for (int j = 0; j < 8; ++j) p[j] = a.lane[j] + a.lane[j + 8];
}

// Sums of sixteen folded rows [16, 8], by neighbouring pairs.
inline F32x16 SumFolded(const float* rows) {
  return ForLanes([=](int j) {
    const float* r = rows + 8 * j;
    return ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]));
  });
}

}  // namespace
}  // namespace certjax

#endif  // CERTJAX_KERNELS_LANES_SCALAR_INL_H_
