// Sixteen float lanes in one 512-bit register; the same results as lanes_scalar-inl.h, bit for bit.
#ifndef CERTJAX_KERNELS_LANES_AVX512_INL_H_
#define CERTJAX_KERNELS_LANES_AVX512_INL_H_

#include <immintrin.h>

#include "kernels/convert-inl.h"
#include "kernels/sum_folded_avx2-inl.h"

namespace certjax {
namespace {

constexpr int kAccumulators = 8;
constexpr int kHeads = 4;  // query heads at a time

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
inline F32x16 Load(const Bf16* p) {  // the even ones, then the odd ones, into the upper halves
  const __m512i twice =
      _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  const __m512i place =
      _mm512_set_epi32(0x0F0E8080, 0x0B0A8080, 0x07068080, 0x03028080, 0x0F0E8080, 0x0B0A8080,
                       0x07068080, 0x03028080, 0x0D0C8080, 0x09088080, 0x05048080, 0x01008080,
                       0x0D0C8080, 0x09088080, 0x05048080, 0x01008080);
  return {_mm512_castsi512_ps(_mm512_shuffle_epi8(twice, place))};
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

struct I32x16 {
  __m512i v;
};

struct Mask16 {
  __mmask16 m;
};

inline __m128i Bytes16(const void* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}
inline I32x16 SetI(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline I32x16 Iota() {
  return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)};
}
inline I32x16 LoadI(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline void StoreI(int32_t* p, I32x16 a) { _mm512_storeu_si512(p, a.v); }
inline I32x16 LoadI(const uint8_t* p) { return {_mm512_cvtepu8_epi32(Bytes16(p))}; }
inline I32x16 LoadI(const int8_t* p) { return {_mm512_cvtepi8_epi32(Bytes16(p))}; }
inline I32x16 LoadI(const uint16_t* p) {
  return {_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline void StoreI8(int8_t* p, I32x16 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(a.v));
}
inline I32x16 AddI(I32x16 a, I32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline I32x16 MulI(I32x16 a, I32x16 b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
inline I32x16 AndI(I32x16 a, I32x16 b) { return {_mm512_and_si512(a.v, b.v)}; }
inline I32x16 XorI(I32x16 a, I32x16 b) { return {_mm512_xor_si512(a.v, b.v)}; }
inline I32x16 MaxI(I32x16 a, I32x16 b) { return {_mm512_max_epi32(a.v, b.v)}; }
inline I32x16 MinI(I32x16 a, I32x16 b) { return {_mm512_min_epi32(a.v, b.v)}; }
template <int n>
inline I32x16 ShiftLeft(I32x16 a) {
  return {_mm512_slli_epi32(a.v, n)};
}
template <int n>
inline I32x16 ShiftRight(I32x16 a) {
  return {_mm512_srli_epi32(a.v, n)};
}
inline F32x16 ToFloat(I32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline I32x16 ToInt(F32x16 a) { return {_mm512_cvtps_epi32(a.v)}; }
inline F32x16 AsFloat(I32x16 a) { return {_mm512_castsi512_ps(a.v)}; }
inline I32x16 AsInt(F32x16 a) { return {_mm512_castps_si512(a.v)}; }

inline F32x16 Max(F32x16 a, F32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F32x16 Min(F32x16 a, F32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F32x16 Div(F32x16 a, F32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F32x16 Sqrt(F32x16 a) { return {_mm512_sqrt_ps(a.v)}; }

inline Mask16 Less(F32x16 a, F32x16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
inline F32x16 Select(Mask16 m, F32x16 yes, F32x16 no) {
  return {_mm512_mask_mov_ps(no.v, m.m, yes.v)};
}
inline uint32_t Bits(Mask16 m) { return m.m; }

inline void StoreHalfUp(uint16_t* p, F32x16 a) {
  constexpr int kUp = _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC;
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, kUp));
}

inline __m512i Quad(const int8_t* p) {
  int32_t x;
  memcpy(&x, p, 4);
  return _mm512_set1_epi32(x);
}

// The high nibbles stay where they are: their sum is a multiple of 16, shifted once at the end.
template <int heads>
inline void DotCodes(const uint8_t* codes, int lines, const int8_t* query, int stride,
                     int32_t (*dots)[2][kLanes]) {
  const __m512i nibble = _mm512_set1_epi8(15);
  __m512i sum[heads][2];
  for (int g = 0; g < heads; ++g) sum[g][0] = sum[g][1] = _mm512_setzero_si512();
  for (int j = 0; j < lines; ++j) {
    const __m512i line = _mm512_loadu_si512(codes + 64 * j);
    const __m512i low = _mm512_and_si512(line, nibble);
    const __m512i high = _mm512_andnot_si512(nibble, line);
    for (int g = 0; g < heads; ++g) {
      const int8_t* q = query + g * stride + 4 * j;
      sum[g][0] = _mm512_dpbusd_epi32(sum[g][0], low, Quad(q));
      sum[g][1] = _mm512_dpbusd_epi32(sum[g][1], high, Quad(q + stride / 2));
    }
  }
  for (int g = 0; g < heads; ++g) {
    _mm512_storeu_si512(dots[g][0], sum[g][0]);
    _mm512_storeu_si512(dots[g][1], _mm512_srai_epi32(sum[g][1], 4));
  }
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
