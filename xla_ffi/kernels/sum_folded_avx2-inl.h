// Reductions of 256-bit registers, shared by the AVX2 and AVX-512 lanes.
#ifndef CERTJAX_KERNELS_SUM_FOLDED_AVX2_INL_H_
#define CERTJAX_KERNELS_SUM_FOLDED_AVX2_INL_H_

#include <immintrin.h>

namespace certjax {
namespace {

// Sums of the eight rows of [8, 8], each by neighbouring pairs.
inline __m256 SumRowsOf8(const float* rows) {
  const auto pair = [rows](int i) {
    return _mm256_hadd_ps(_mm256_loadu_ps(rows + 8 * i), _mm256_loadu_ps(rows + 8 * i + 8));
  };
  const __m256 left = _mm256_hadd_ps(pair(0), pair(2));  // rows 0 … 3: halves of 4 in each 128 bits
  const __m256 right = _mm256_hadd_ps(pair(4), pair(6));  // rows 4 … 7
  return _mm256_add_ps(_mm256_permute2f128_ps(left, right, 0x20),
                       _mm256_permute2f128_ps(left, right, 0x31));
}

inline float MaxOf8(__m256 a) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

}  // namespace
}  // namespace certjax

#endif  // CERTJAX_KERNELS_SUM_FOLDED_AVX2_INL_H_
