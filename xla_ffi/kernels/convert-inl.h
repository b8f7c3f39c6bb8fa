// Exact conversions and upward roundings, shared by all ISA levels.
#ifndef CERTJAX_KERNELS_CONVERT_INL_H_
#define CERTJAX_KERNELS_CONVERT_INL_H_

#include <cstdint>
#include <cstring>

#include "kernels/types.h"

namespace certjax {
namespace {

// Element types of the caches: one C++ type for each Storage.
struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

inline float FromBits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

inline uint32_t ToBits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

inline float ToF32(float x) { return x; }

inline float ToF32(Bf16 x) { return FromBits(uint32_t{x.bits} << 16); }

inline float ToF32(F16 x) {
  const uint32_t sign = uint32_t{x.bits & 0x8000u} << 16;
  const uint32_t exponent = (x.bits >> 10) & 31;
  const uint32_t mantissa = x.bits & 0x3FF;
  if (exponent == 0) {  // zero and subnormals: mantissa · 2⁻²⁴
    return FromBits(sign | ToBits(static_cast<float>(mantissa) * 0x1p-24f));
  }
  const uint32_t wide = exponent == 31 ? 255 : exponent + 112;
  return FromBits(sign | (wide << 23) | (mantissa << 13));
}

// Smallest float ≥ x, for x ≥ 0.
inline float F32Up(double x) {
  const float nearest = static_cast<float>(x);
  return static_cast<double>(nearest) < x ? FromBits(ToBits(nearest) + 1) : nearest;
}

// Bits of the smallest bfloat16 ≥ x, for x ≥ 0.
inline uint16_t Bf16Up(float x) { return static_cast<uint16_t>((ToBits(x) + 0xFFFF) >> 16); }

}  // namespace
}  // namespace certjax

#endif  // CERTJAX_KERNELS_CONVERT_INL_H_
