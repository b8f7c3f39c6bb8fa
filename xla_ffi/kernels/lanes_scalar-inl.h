// Sixteen float lanes in plain C++: the definition that the other two lanes_*-inl.h follow.
#ifndef CERTJAX_KERNELS_LANES_SCALAR_INL_H_
#define CERTJAX_KERNELS_LANES_SCALAR_INL_H_

#include "kernels/convert-inl.h"

namespace certjax {
namespace {

constexpr int kAccumulators = 4;  // as in the AVX2 level; results do not depend on it
constexpr int kHeads = 2;         // query heads at a time

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

struct I32x16 {
  int32_t lane[kLanes];
};

struct Mask16 {
  bool lane[kLanes];
};

template <typename Fn>
inline I32x16 ForLanesI(Fn fn) {
  I32x16 out;
  for (int j = 0; j < kLanes; ++j) out.lane[j] = static_cast<int32_t>(fn(j));
  return out;
}

inline I32x16 SetI(int32_t x) {
  return ForLanesI([=](int) { return x; });
}
inline I32x16 Iota() {
  return ForLanesI([](int j) { return j; });
}
// Of int32_t, uint8_t, int8_t or uint16_t.
template <typename T>
inline I32x16 LoadI(const T* p) {
  return ForLanesI([=](int j) { return p[j]; });
}
inline void StoreI(int32_t* p, I32x16 a) { memcpy(p, a.lane, sizeof(a.lane)); }
// Values must fit.
inline void StoreI8(int8_t* p, I32x16 a) {
  for (int j = 0; j < kLanes; ++j) p[j] = static_cast<int8_t>(a.lane[j]);
}
// Sums, products and shifts are those of uint32_t.
inline uint32_t U32(int32_t x) { return static_cast<uint32_t>(x); }
inline I32x16 AddI(I32x16 a, I32x16 b) {
  return ForLanesI([&](int j) { return U32(a.lane[j]) + U32(b.lane[j]); });
}
inline I32x16 MulI(I32x16 a, I32x16 b) {
  return ForLanesI([&](int j) { return U32(a.lane[j]) * U32(b.lane[j]); });
}
inline I32x16 AndI(I32x16 a, I32x16 b) {
  return ForLanesI([&](int j) { return a.lane[j] & b.lane[j]; });
}
inline I32x16 XorI(I32x16 a, I32x16 b) {
  return ForLanesI([&](int j) { return a.lane[j] ^ b.lane[j]; });
}
inline I32x16 MaxI(I32x16 a, I32x16 b) {
  return ForLanesI([&](int j) { return a.lane[j] > b.lane[j] ? a.lane[j] : b.lane[j]; });
}
inline I32x16 MinI(I32x16 a, I32x16 b) {
  return ForLanesI([&](int j) { return a.lane[j] < b.lane[j] ? a.lane[j] : b.lane[j]; });
}
template <int n>
inline I32x16 ShiftLeft(I32x16 a) {
  return ForLanesI([&](int j) { return U32(a.lane[j]) << n; });
}
template <int n>
inline I32x16 ShiftRight(I32x16 a) {
  return ForLanesI([&](int j) { return U32(a.lane[j]) >> n; });
}
inline F32x16 ToFloat(I32x16 a) {
  return ForLanes([&](int j) { return static_cast<float>(a.lane[j]); });
}
// To the nearest, halves to even; the value must fit.
inline I32x16 ToInt(F32x16 a) {
  return ForLanesI([&](int j) { return static_cast<int32_t>(__builtin_rintf(a.lane[j])); });
}
inline F32x16 AsFloat(I32x16 a) {
  return ForLanes([&](int j) { return FromBits(U32(a.lane[j])); });
}
inline I32x16 AsInt(F32x16 a) {
  return ForLanesI([&](int j) { return ToBits(a.lane[j]); });
}

// The second operand where one is NaN.
inline F32x16 Max(F32x16 a, F32x16 b) {
  return ForLanes([&](int j) { return a.lane[j] > b.lane[j] ? a.lane[j] : b.lane[j]; });
}
inline F32x16 Min(F32x16 a, F32x16 b) {
  return ForLanes([&](int j) { return a.lane[j] < b.lane[j] ? a.lane[j] : b.lane[j]; });
}
inline F32x16 Div(F32x16 a, F32x16 b) {
  return ForLanes([&](int j) { return a.lane[j] / b.lane[j]; });
}
inline F32x16 Sqrt(F32x16 a) {
  return ForLanes([&](int j) { return __builtin_sqrtf(a.lane[j]); });
}

// False where one is NaN.
inline Mask16 Less(F32x16 a, F32x16 b) {
  Mask16 out;
  for (int j = 0; j < kLanes; ++j) out.lane[j] = a.lane[j] < b.lane[j];
  return out;
}
inline F32x16 Select(Mask16 m, F32x16 yes, F32x16 no) {
  return ForLanes([&](int j) { return m.lane[j] ? yes.lane[j] : no.lane[j]; });
}
inline uint32_t Bits(Mask16 m) {
  uint32_t bits = 0;
  for (int j = 0; j < kLanes; ++j) bits |= uint32_t{m.lane[j]} << j;
  return bits;
}

// Sixteen float16, each the smallest that is not below a.
inline void StoreHalfUp(uint16_t* p, F32x16 a) {
  for (int j = 0; j < kLanes; ++j) p[j] = F16Up(a.lane[j]);
}

// dots[g][0][k] = Σ_c low nibble · query and dots[g][1][k] = Σ_c high nibble · query, for 16 keys
// and `lines` lines of codes (layout: certjax/quantization.py); query[g] holds `stride` = 8 · lines
// values in −127 … 127. Exact.
template <int heads>
inline void DotCodes(const uint8_t* codes, int lines, const int8_t* query, int stride,
                     int32_t (*dots)[2][kLanes]) {
  for (int g = 0; g < heads; ++g) {
    for (int k = 0; k < kLanes; ++k) {
      int32_t low = 0;
      int32_t high = 0;
      for (int x = 0; x < 4 * lines; ++x) {
        const int code = codes[x / 4 * 64 + 4 * k + x % 4];
        low += (code & 15) * query[g * stride + x];
        high += (code >> 4) * query[g * stride + stride / 2 + x];
      }
      dots[g][0][k] = low;
      dots[g][1][k] = high;
    }
  }
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
