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

// Bits of the smallest float16 ≥ x; −65504 below that, a quiet NaN for NaN.
inline uint16_t F16Up(float x) {
  const uint32_t bits = ToBits(x);
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000)
    return static_cast<uint16_t>(sign | 0x7E00 | (magnitude >> 13 & 0x3FF));
  if (magnitude == 0x7F800000) return static_cast<uint16_t>(sign | 0x7C00);
  const uint32_t away = sign ? 0 : 1;  // upward is away from zero for positive numbers only
  if (magnitude >= 0x47800000) return static_cast<uint16_t>(sign ? 0xFBFF : 0x7C00);
  if (magnitude >= 0x38800000) {  // normal: 10 of 23 bits stay; a carry runs into the exponent
    return static_cast<uint16_t>(sign | ((magnitude + away * 0x1FFF - 0x38000000) >> 13));
  }
  // Subnormal: units of 2⁻²⁴, exact in double.
  const double units = static_cast<double>(FromBits(magnitude)) * 0x1p24;
  const double whole = away ? __builtin_ceil(units) : __builtin_floor(units);
  return static_cast<uint16_t>(sign | static_cast<uint32_t>(whole));
}

// Bits of the smallest bfloat16 ≥ x, for x ≥ 0.
inline uint16_t Bf16Up(float x) { return static_cast<uint16_t>((ToBits(x) + 0xFFFF) >> 16); }

}  // namespace
}  // namespace certjax

#endif  // CERTJAX_KERNELS_CONVERT_INL_H_
