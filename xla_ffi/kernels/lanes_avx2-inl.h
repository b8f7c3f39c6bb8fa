// Sixteen float lanes in two 256-bit registers; the same results as lanes_scalar-inl.h, bit for
// bit.
#ifndef CERTJAX_KERNELS_LANES_AVX2_INL_H_
#define CERTJAX_KERNELS_LANES_AVX2_INL_H_

#include <immintrin.h>

#include "kernels/convert-inl.h"
#include "kernels/sum_folded_avx2-inl.h"

namespace certjax {
namespace {

constexpr int kAccumulators = 4;  // 8 registers: 2 additions a cycle, 4 cycles each

struct F32x16 {
  __m256 lo, hi;
};

inline F32x16 Set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F32x16 Load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline F32x16 Load(const F16* p) {
  const auto* half = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(half)), _mm256_cvtph_ps(_mm_loadu_si128(half + 1))};
}
inline F32x16 Load(const Bf16* p) {
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i odd = _mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xFFFF0000)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)), _mm256_castsi256_ps(odd)};
}
inline void Store(float* p, F32x16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}

inline F32x16 Fma(F32x16 a, F32x16 b, F32x16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline F32x16 Add(F32x16 a, F32x16 b) {
  return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
inline F32x16 Sub(F32x16 a, F32x16 b) {
  return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
inline F32x16 Mul(F32x16 a, F32x16 b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}

inline float MaxLanes(F32x16 a) { return MaxOf8(_mm256_max_ps(a.lo, a.hi)); }

inline F32x16 ScaleByExponent(F32x16 a, F32x16 t) {
  const auto half = [](__m256 x, __m256 n) {
    const __m256i shifted = _mm256_slli_epi32(_mm256_castps_si256(n), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), shifted));
  };
  return {half(a.lo, t.lo), half(a.hi, t.hi)};
}

inline F32x16 ZeroBelow(F32x16 x, float limit, F32x16 a) {
  const __m256 bound = _mm256_set1_ps(limit);
  return {_mm256_andnot_ps(_mm256_cmp_ps(x.lo, bound, _CMP_LT_OQ), a.lo),
          _mm256_andnot_ps(_mm256_cmp_ps(x.hi, bound, _CMP_LT_OQ), a.hi)};
}

inline void StoreFolded(float* p, F32x16 a) { _mm256_storeu_ps(p, _mm256_add_ps(a.lo, a.hi)); }

inline F32x16 SumFolded(const float* rows) { return {SumRowsOf8(rows), SumRowsOf8(rows + 64)}; }

}  // namespace
}  // namespace certjax

#endif  // CERTJAX_KERNELS_LANES_AVX2_INL_H_
