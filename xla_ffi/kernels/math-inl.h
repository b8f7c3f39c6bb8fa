// Elementary functions on sixteen lanes, and horizontal sums. Included after one of the
// lanes_*-inl.h; every operation is written out, so all ISA levels give the same bits.
#ifndef CERTJAX_KERNELS_MATH_INL_H_
#define CERTJAX_KERNELS_MATH_INL_H_

#include "kernels/convert-inl.h"

namespace certjax {
namespace {

constexpr float kInf = __builtin_inff();
constexpr float kTiny = 1e-30f;  // as TINY of certjax/certificate.py

inline F32x16 Abs(F32x16 a) { return AsFloat(AndI(AsInt(a), SetI(0x7FFFFFFF))); }
inline F32x16 Clamp(F32x16 a, float low, float high) { return Min(Max(a, Set1(low)), Set1(high)); }

// Lanes j < n of a, `other` beyond.
inline F32x16 FirstLanes(F32x16 a, int n, float other) {
  return Select(Less(ToFloat(Iota()), Set1(static_cast<float>(n))), a, Set1(other));
}

inline float SumLanes(F32x16 a) {
  float r[8];
  StoreFolded(r, a);
  return ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]));
}

// Cody–Waite reduction by ln 2 in two parts: x = n ln 2 + r, |r| ≤ ln 2 / 2; t holds n in its low
// bits.
inline F32x16 ReduceByLn2(F32x16 x, F32x16* t) {
  const F32x16 magic = Set1(0x1.8p23f);
  *t = Fma(x, Set1(0x1.715476p0f), magic);
  const F32x16 n = Sub(*t, magic);
  return Fma(n, Set1(-0x1.7f7d1cp-20f), Fma(n, Set1(-0x1.62e4p-1f), x));
}

// (eʳ − 1) / r: the Taylor polynomial whose remainder is below 6e-9 on |r| ≤ ln 2 / 2.
inline F32x16 ExpSeries(F32x16 r) {
  F32x16 p = Set1(1.0f / 5040);
  p = Fma(p, r, Set1(1.0f / 720));
  p = Fma(p, r, Set1(1.0f / 120));
  p = Fma(p, r, Set1(1.0f / 24));
  p = Fma(p, r, Set1(1.0f / 6));
  p = Fma(p, r, Set1(0.5f));
  return Fma(p, r, Set1(1.0f));
}

// exp(x), relative error below 3e-7; exactly 0 below −86, where 2ⁿ would leave the normal range,
// and exp(88) above 88.
inline F32x16 Exp(F32x16 x) {
  F32x16 t;
  const F32x16 r = ReduceByLn2(Min(Set1(88.0f), x), &t);
  return ZeroBelow(x, -86.0f, ScaleByExponent(Fma(ExpSeries(r), r, Set1(1.0f)), t));
}

inline float Exp(float x) {
  float lanes[kLanes];
  Store(lanes, Exp(Set1(x)));
  return lanes[0];
}

// 1 − exp(x) for x ≤ 0, relative error below 4e-7.
inline F32x16 OneMinusExp(F32x16 x) {
  const F32x16 small = Mul(Sub(Set1(0.0f), x), ExpSeries(Max(x, Set1(-0.34f))));
  return Select(Less(x, Set1(-0.34f)), Sub(Set1(1.0f), Exp(x)), small);
}

// 2 artanh(s) for |s| ≤ 0.1716, remainder below 4e-10 · s.
inline F32x16 TwiceArtanh(F32x16 s) {
  const F32x16 z = Mul(s, s);
  F32x16 p = Set1(2.0f / 9);
  p = Fma(p, z, Set1(2.0f / 7));
  p = Fma(p, z, Set1(2.0f / 5));
  p = Fma(p, z, Set1(2.0f / 3));
  return Fma(Mul(p, z), s, Add(s, s));
}

// ln x for normal x > 0: x = 2ⁿ m with m in √½ … √2, ln m = 2 artanh((m − 1) / (m + 1)).
inline F32x16 Log(F32x16 x) {
  const I32x16 offset = AddI(AsInt(x), SetI(0x3F800000 - 0x3F3504F3));
  const F32x16 n = ToFloat(AddI(ShiftRight<23>(offset), SetI(-127)));
  const I32x16 m = AddI(AndI(offset, SetI(0x007FFFFF)), SetI(0x3F3504F3));
  const F32x16 one = Set1(1.0f);
  const F32x16 s = Div(Sub(AsFloat(m), one), Add(AsFloat(m), one));
  return Fma(n, Set1(0x1.62e4p-1f), Fma(n, Set1(0x1.7f7d1cp-20f), TwiceArtanh(s)));
}

// ln(1 + x) for x ≥ 0.
inline F32x16 Log1p(F32x16 x) {
  const F32x16 near = TwiceArtanh(Div(Min(x, Set1(0.4f)), Add(Set1(2.0f), Min(x, Set1(0.4f)))));
  return Select(Less(x, Set1(0.4f)), near, Log(Add(Set1(1.0f), x)));
}

inline float Log(float x) {
  float lanes[kLanes];
  Store(lanes, Log(Set1(x)));
  return lanes[0];
}

}  // namespace
}  // namespace certjax

#endif  // CERTJAX_KERNELS_MATH_INL_H_
