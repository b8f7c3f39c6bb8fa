// Sixteen float lanes in one 512-bit register; the same results as lanes_scalar-inl.h, bit for bit.
#ifndef CERTJAX_KERNELS_LANES_AVX512_INL_H_
#define CERTJAX_KERNELS_LANES_AVX512_INL_H_

#include <immintrin.h>

#include "kernels/convert-inl.h"
#include "kernels/sum_folded_avx2-inl.h"

namespace certjax {
namespace {

constexpr int kAccumulators = 8;

struct F32x16 {
  __m512 v;
};

inline __m256 Upper(__m512 a) {
  return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a), 1));
}

inline F32x16 Set1(float x) { return {_mm512_set1_ps(x)}; }
inline F32x16 Load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline F32x16 Load(const F16* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline F32x16 Load(const Bf16* p) {
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i even = _mm256_slli_epi32(pairs, 16);
  const __m256i odd = _mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xFFFF0000)));
  return {_mm512_castsi512_ps(_mm512_inserti64x4(_mm512_castsi256_si512(even), odd, 1))};
}
inline void Store(float* p, F32x16 a) { _mm512_storeu_ps(p, a.v); }

inline F32x16 Fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F32x16 Add(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F32x16 Sub(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F32x16 Mul(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }

inline float MaxLanes(F32x16 a) {
  return MaxOf8(_mm256_max_ps(_mm512_castps512_ps256(a.v), Upper(a.v)));
}

inline F32x16 ScaleByExponent(F32x16 a, F32x16 t) {
  const __m512i shifted = _mm512_slli_epi32(_mm512_castps_si512(t.v), 23);
  return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a.v), shifted))};
}

inline F32x16 ZeroBelow(F32x16 x, float limit, F32x16 a) {
  const __mmask16 keep = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(limit), _CMP_NLT_UQ);
  return {_mm512_maskz_mov_ps(keep, a.v)};
}

inline void StoreFolded(float* p, F32x16 a) {
  _mm256_storeu_ps(p, _mm256_add_ps(_mm512_castps512_ps256(a.v), Upper(a.v)));
}

inline F32x16 SumFolded(const float* rows) {
  const __m512 low = _mm512_castps256_ps512(SumRowsOf8(rows));
  const __m256d high = _mm256_castps_pd(SumRowsOf8(rows + 64));
  return {_mm512_castpd_ps(_mm512_insertf64x4(_mm512_castps_pd(low), high, 1))};
}

}  // namespace
}  // namespace certjax

#endif  // CERTJAX_KERNELS_LANES_AVX512_INL_H_
