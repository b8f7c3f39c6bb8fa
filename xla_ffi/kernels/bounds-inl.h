// Bounds of the certificate on the grid of radii, one interval a lane. Included after one of the
// lanes_*-inl.h. The definitions and proofs are those of certjax/certificate.py, function by
// function.
#ifndef CERTJAX_KERNELS_BOUNDS_INL_H_
#define CERTJAX_KERNELS_BOUNDS_INL_H_

#include "kernels/math-inl.h"

namespace certjax {
namespace {

constexpr float kOutward = 1.0f + 1e-5f;
constexpr float kMargin = 1.0f + 0x1p-10f;
constexpr int kGrid = 16;  // intervals, one a lane

// Σ ω ‖v − o‖² at most, over all o within b of ô.
inline F32x16 SpreadUpper(double weight, double scatter, double far, F32x16 b) {
  const F32x16 x = Add(Set1(static_cast<float>(far) * kOutward), b);
  const F32x16 moved =
      Fma(Mul(x, x), Set1(static_cast<float>(weight)), Set1(static_cast<float>(scatter)));
  return Mul(moved, Set1(weight > 0.0 ? kOutward : 0.0f));
}

// The root μ ≥ k of μ − k − k ln(μ / k) = L, from above.
inline F32x16 MeanUpper(F32x16 k, float log_inverse) {
  const F32x16 log_inv = Set1(log_inverse);
  const F32x16 safe = Max(k, Set1(kTiny));
  F32x16 mu = Add(Add(k, Sqrt(Mul(Mul(Set1(2.0f), k), log_inv))), log_inv);
  const Mask16 none = Less(k, Set1(2 * kTiny));
  for (int i = 0; i < 8; ++i) {
    const F32x16 step = Sub(mu, k);
    const F32x16 excess = Sub(Sub(step, Mul(k, Log1p(Div(Max(step, Set1(0.0f)), safe)))), log_inv);
    const F32x16 slope = Sub(Set1(1.0f), Div(k, mu));
    const F32x16 change = Div(Max(excess, Set1(0.0f)), Max(slope, Set1(kTiny)));
    mu = Select(none, mu, Sub(mu, change));
  }
  return Mul(Max(mu, k), Set1(kOutward));
}

// h(y) = (1 + y) ln(1 + y) − y, to 3e-5, which kMargin covers.
inline F32x16 Bennett(F32x16 y) {
  const F32x16 series = Mul(Mul(y, y), Sub(Set1(0.5f), Mul(y, Set1(1.0f / 6))));
  const F32x16 whole = Sub(Mul(Add(Set1(1.0f), y), Log1p(y)), y);
  return Select(Less(y, Set1(0.02f)), series, whole);
}

struct RangeFactor {
  F32x16 offset, size_max, size_min;

  explicit RangeFactor(const LevelState& s)
      : offset(Set1(s.offset)), size_max(Set1(s.size_max)), size_min(Set1(s.size_min)) {}

  // rng(x): g ‖v − o‖ ≤ τ rng(x) for every light key and x ≥ ‖o − c0‖.
  F32x16 operator()(F32x16 x) const {
    const F32x16 wide = Mul(x, Set1(kOutward));
    const F32x16 r = Div(wide, offset);
    const F32x16 by_offset = Sqrt(Fma(r, r, Set1(1.0f)));
    return Mul(Min(by_offset, Div(Add(size_max, wide), size_min)), Set1(kOutward));
  }
};

inline float Lane0(F32x16 a) {
  float lanes[kLanes];
  Store(lanes, a);
  return lanes[0];
}

// b* = b_0 < … < b_16 = b_max.
inline void Grid(float tight, float b_max, float* b) {
  float ratio = b_max / (tight > kTiny ? tight : kTiny);
  ratio = ratio > 1.0f ? ratio : 1.0f;
  const F32x16 power = Mul(ToFloat(Iota()), Set1(1.0f / kGrid));
  Store(b, Mul(Set1(tight), Exp(Mul(Mul(power, power), Set1(Log(ratio))))));
  const float last = b_max * kOutward;
  b[0] = tight;
  b[kGrid] = last > tight ? last : tight;
}

// τ rng(x0 + b), the largest ‖g (v − o)‖ of a light key.
inline F32x16 Largest(const RangeFactor& range, double tau, double x0, F32x16 b) {
  const F32x16 x = Add(Set1(static_cast<float>(x0) * kOutward), b);
  return Mul(Set1(static_cast<float>(tau)), range(x));
}

}  // namespace
}  // namespace certjax

#endif  // CERTJAX_KERNELS_BOUNDS_INL_H_
