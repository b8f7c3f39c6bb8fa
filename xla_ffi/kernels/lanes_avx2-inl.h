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
constexpr int kHeads = 2;         // query heads at a time

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

struct I32x16 {
  __m256i lo, hi;
};

// All ones where true.
struct Mask16 {
  __m256 lo, hi;
};

inline I32x16 SetI(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I32x16 Iota() {
  return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
          _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
}
inline I32x16 LoadI(const int32_t* p) {
  const auto* v = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(v), _mm256_loadu_si256(v + 1)};
}
inline void StoreI(int32_t* p, I32x16 a) {
  auto* v = reinterpret_cast<__m256i*>(p);
  _mm256_storeu_si256(v, a.lo);
  _mm256_storeu_si256(v + 1, a.hi);
}
inline I32x16 LoadI(const uint8_t* p) {
  return {_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline I32x16 LoadI(const int8_t* p) {
  return {_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline I32x16 LoadI(const uint16_t* p) {
  const auto* v = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtepu16_epi32(_mm_loadu_si128(v)), _mm256_cvtepu16_epi32(_mm_loadu_si128(v + 1))};
}
inline void StoreI8(int8_t* p, I32x16 a) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xD8);
  const __m128i bytes =
      _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
inline I32x16 AddI(I32x16 a, I32x16 b) {
  return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}
inline I32x16 MulI(I32x16 a, I32x16 b) {
  return {_mm256_mullo_epi32(a.lo, b.lo), _mm256_mullo_epi32(a.hi, b.hi)};
}
inline I32x16 AndI(I32x16 a, I32x16 b) {
  return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)};
}
inline I32x16 XorI(I32x16 a, I32x16 b) {
  return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)};
}
inline I32x16 MaxI(I32x16 a, I32x16 b) {
  return {_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi)};
}
inline I32x16 MinI(I32x16 a, I32x16 b) {
  return {_mm256_min_epi32(a.lo, b.lo), _mm256_min_epi32(a.hi, b.hi)};
}
template <int n>
inline I32x16 ShiftLeft(I32x16 a) {
  return {_mm256_slli_epi32(a.lo, n), _mm256_slli_epi32(a.hi, n)};
}
template <int n>
inline I32x16 ShiftRight(I32x16 a) {
  return {_mm256_srli_epi32(a.lo, n), _mm256_srli_epi32(a.hi, n)};
}
inline F32x16 ToFloat(I32x16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline I32x16 ToInt(F32x16 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
inline F32x16 AsFloat(I32x16 a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
inline I32x16 AsInt(F32x16 a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }

inline F32x16 Max(F32x16 a, F32x16 b) {
  return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
inline F32x16 Min(F32x16 a, F32x16 b) {
  return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}
inline F32x16 Div(F32x16 a, F32x16 b) {
  return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
inline F32x16 Sqrt(F32x16 a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }

inline Mask16 Less(F32x16 a, F32x16 b) {
  return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)};
}
inline F32x16 Select(Mask16 m, F32x16 yes, F32x16 no) {
  return {_mm256_blendv_ps(no.lo, yes.lo, m.lo), _mm256_blendv_ps(no.hi, yes.hi, m.hi)};
}
inline uint32_t Bits(Mask16 m) {
  return static_cast<uint32_t>(_mm256_movemask_ps(m.lo) | _mm256_movemask_ps(m.hi) << 8);
}

inline void StoreHalfUp(uint16_t* p, F32x16 a) {
  constexpr int kUp = _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC;
  auto* v = reinterpret_cast<__m128i*>(p);
  _mm_storeu_si128(v, _mm256_cvtps_ph(a.lo, kUp));
  _mm_storeu_si128(v + 1, _mm256_cvtps_ph(a.hi, kUp));
}

inline __m256i Quad(const int8_t* p) {
  int32_t x;
  memcpy(&x, p, 4);
  return _mm256_set1_epi32(x);
}

// Adds the dots of `count` half lines of codes to sum: low nibbles, then high ones. Unrolled whole,
// so that the sums stay in registers: half a line at a time leaves room for four heads.
template <int heads, int count>
inline void AddDots(const uint8_t* codes, const int8_t* query, int stride,
                    __m256i (&sum)[heads][2]) {
  const __m256i nibble = _mm256_set1_epi8(15);
#if defined(__AVXVNNI__)
  auto& part = sum;
#else
  static_assert(count * 2 * 15 * 127 < 1 << 15, "sums of 16 bits");
  __m256i part[heads][2];
  for (int g = 0; g < heads; ++g) part[g][0] = part[g][1] = _mm256_setzero_si256();
#endif
#pragma GCC unroll 8
  for (int j = 0; j < count; ++j) {
    const __m256i line = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + 64 * j));
    const __m256i low = _mm256_and_si256(line, nibble);
    const __m256i high = _mm256_and_si256(_mm256_srli_epi16(line, 4), nibble);
#pragma GCC unroll 4
    for (int g = 0; g < heads; ++g) {
      const __m256i q0 = Quad(query + g * stride + 4 * j);
      const __m256i q1 = Quad(query + g * stride + stride / 2 + 4 * j);
#if defined(__AVXVNNI__)
      part[g][0] = _mm256_dpbusd_avx_epi32(part[g][0], low, q0);
      part[g][1] = _mm256_dpbusd_avx_epi32(part[g][1], high, q1);
#else
      part[g][0] = _mm256_add_epi16(part[g][0], _mm256_maddubs_epi16(low, q0));
      part[g][1] = _mm256_add_epi16(part[g][1], _mm256_maddubs_epi16(high, q1));
      // Else the compiler makes all products first, sums them as a tree, and spills.
      __asm__("" : "+x"(part[g][0]), "+x"(part[g][1]));
#endif
    }
  }
#if !defined(__AVXVNNI__)
  const __m256i ones = _mm256_set1_epi16(1);
  for (int g = 0; g < heads; ++g) {
    for (int x = 0; x < 2; ++x) {
      sum[g][x] = _mm256_add_epi32(sum[g][x], _mm256_madd_epi16(part[g][x], ones));
    }
  }
#endif
}

template <int heads>
inline void DotCodes(const uint8_t* codes, int lines, const int8_t* query, int stride,
                     int32_t (*dots)[2][kLanes]) {
  for (int half = 0; half < 2; ++half) {
    // Else the compiler loads every quad of the query once for both halves and has no registers.
    __asm__("" : "+r"(query));
    __m256i sum[heads][2];
    for (int g = 0; g < heads; ++g) sum[g][0] = sum[g][1] = _mm256_setzero_si256();
    int j = 0;
    for (; j + 8 <= lines; j += 8) {
      AddDots<heads, 8>(codes + 64 * j + 32 * half, query + 4 * j, stride, sum);
    }
    for (; j < lines; j += 2) {  // head_dim is a multiple of 16
      AddDots<heads, 2>(codes + 64 * j + 32 * half, query + 4 * j, stride, sum);
    }
    for (int g = 0; g < heads; ++g) {
      for (int x = 0; x < 2; ++x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(&dots[g][x][8 * half]), sum[g][x]);
      }
    }
  }
}

inline void StoreFolded(float* p, F32x16 a) { _mm256_storeu_ps(p, _mm256_add_ps(a.lo, a.hi)); }

inline F32x16 SumFolded(const float* rows) { return {SumRowsOf8(rows), SumRowsOf8(rows + 64)}; }

}  // namespace
}  // namespace certjax

#endif  // CERTJAX_KERNELS_LANES_AVX2_INL_H_
