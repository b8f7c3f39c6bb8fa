// The measure "denominator": an interval for D, with the scan as control variate. Included after
// one of the lanes_*-inl.h. Definitions and proofs: scan_interval of certjax/levels.py and
// denominator_interval of certjax/certificate.py.
#ifndef CERTJAX_KERNELS_DENOMINATOR_INL_H_
#define CERTJAX_KERNELS_DENOMINATOR_INL_H_

#include "kernels/math-inl.h"

namespace certjax {
namespace {

constexpr float kHuge = 3e38f;
constexpr float kUp = 0.9f;  // l τ of the upper bound

inline void AddLanes(double* sum, F32x16 x) {
  float lanes[kLanes];
  Store(lanes, x);
  for (int j = 0; j < kLanes; ++j) sum[j] += lanes[j];
}

inline double SumOf16(const double* x) {
  double sum = 0.0;
  for (int j = 0; j < kLanes; ++j) sum += x[j];
  return sum;
}

// exp(x); inf from 88 on, and for NaN.
inline F32x16 ExpOrInf(F32x16 x) { return Select(Less(x, Set1(88.0f)), Exp(x), Set1(kInf)); }

// What sixteen keys add to ScanBounds. The scan adds up the pool and a level takes its heavy keys
// away again: the same function of the same numbers, summed in double, so that nothing is left.
struct ScanTerms {
  F32x16 low, middle, high;

  ScanTerms(F32x16 score, F32x16 half, F32x16 lower) {
    const F32x16 x = Sub(score, lower);
    low = ExpOrInf(Sub(x, half));
    middle = ExpOrInf(x);
    high = ExpOrInf(Add(x, half));
  }
};

// The sums of a chunk, once its scan is done.
inline void SumScan(CertifiedHead& a, int64_t chunk) {
  const int G = a.group;
  const int64_t first = chunk * kChunkBlocks;
  const int64_t left = Blocks(a) - first;
  const int64_t groups = (left < kChunkBlocks ? left : kChunkBlocks) * (kBlock / kLanes);
  for (int g = 0; g < G; ++g) {
    const F32x16 lower = Set1(a.chunk[chunk].head[g].lower);
    double low[kLanes] = {}, middle[kLanes] = {}, high[kLanes] = {};
    F32x16 widest = Set1(0.0f);
    for (int64_t i = 0; i < groups; ++i) {
      const int64_t at = ((first * (kBlock / kLanes) + i) * G + g) * kLanes;
      const F32x16 half = Load(a.half_width + at);
      const ScanTerms terms(Load(a.scan_score + at), half, lower);
      AddLanes(low, terms.low);
      AddLanes(middle, terms.middle);
      AddLanes(high, terms.high);
      widest = Max(half, widest);
    }
    a.scan_chunk[chunk * G + g] = {SumOf16(low), SumOf16(middle), SumOf16(high), MaxLanes(widest)};
  }
}

// What turns sums relative to a chunk into sums relative to exp(c).
inline double ChunkWeight(const CertifiedHead& a, int g, int64_t chunk) {
  return __builtin_exp(double{a.chunk[chunk].head[g].lower} - double{a.state[g].top});
}

inline ScanBounds MergeScan(const CertifiedHead& a, int g) {
  ScanBounds sum = {};
  const int64_t chunks = Chunks(a);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const ScanBounds& x = a.scan_chunk[chunk * a.group + g];
    const double weight = ChunkWeight(a, g, chunk);
    sum.low += weight * x.low;
    sum.middle += weight * x.middle;
    sum.high += weight * x.high;
    sum.widest = x.widest > sum.widest ? x.widest : sum.widest;
  }
  return sum;
}

// 1 − exp(x) for any x.
inline F32x16 OneMinusExpAny(F32x16 x) {
  const F32x16 near = Clamp(x, -0.34f, 0.34f);
  const F32x16 small = Mul(Sub(Set1(0.0f), near), ExpSeries(near));
  return Select(Less(Abs(x), Set1(0.34f)), small, Sub(Set1(1.0f), Exp(x)));
}

// ln(1 + x) for x ≥ −0.95.
inline F32x16 Log1pAny(F32x16 x) {
  const F32x16 near = Clamp(x, -0.29f, 0.4f);
  const F32x16 small = TwiceArtanh(Div(near, Add(Set1(2.0f), near)));
  const F32x16 far = Select(Less(x, Set1(0.4f)), small, Log(Add(Set1(1.0f), x)));
  return Select(Less(x, Set1(-0.29f)), Log(Add(Set1(1.0f), x)), far);
}

struct Interval {
  double low, high;
};

// The sampled keys of a query head, of which 16 at a time are added up.
class IntervalSums {
 public:
  IntervalSums(const CertifiedHead& head, int g) : a_(head), s_(head.state[g]), g_(g) {
    const double reach = __builtin_expm1(double{s_.scan.widest});
    const double down = kUp / (reach > 1e-6 ? reach : 1e-6);
    down_ = static_cast<float>(down < 4.0 ? down : 4.0);
  }

  // `score` is s − c.
  void Draw(int64_t chunk, int32_t key, float score, bool light) {
    const int64_t group = (key - FirstBlock(a_) * kBlock) / kLanes;
    const int64_t at = (group * a_.group + g_) * kLanes + key % kLanes;
    scan_[n_] = a_.scan_score[at];
    half_[n_] = a_.half_width[at];
    lower_[n_] = a_.chunk[chunk].head[g_].lower;
    score_[n_] = score;
    heavy_weight_[n_] = light ? 0.0 : ChunkWeight(a_, g_, chunk);
    light_[n_] = light ? 1.0f : 0.0f;
    if (++n_ == kLanes) AddTile();
  }

  // Of D relative to exp(c); `exact` is Σ w over exact and heavy keys, each side fails with
  // probability e^−log_inverse. Where a sum is not finite, nor is an end of the interval.
  Interval Finish(double exact, double tau, double log_inverse) {
    if (n_ > 0) AddTile();
    const double base = exact + (s_.scan.middle - heavy_.middle);
    const double low = base + tau * (SumOf16(down_sum_) - log_inverse) / down_;
    const double high = base + tau * (SumOf16(up_sum_) + log_inverse) / kUp;
    const double surely_low = exact + (s_.scan.low - heavy_.low);
    // Σ exp(s̃ + half-width) may be 10¹⁵ D, and what the heavy keys leave of it, rounding alone.
    const double left = static_cast<double>(a_.capacity) * 0x1p-52 * s_.scan.high;
    const double surely_high = exact + (s_.scan.high - heavy_.high) + left;
    return {low > surely_low ? low : surely_low, high < surely_high ? high : surely_high};
  }

 private:
  void AddTile() {
    const int n = n_;
    for (int j = n; j < kLanes; ++j) scan_[j] = half_[j] = lower_[j] = score_[j] = light_[j] = 0.0f;
    const F32x16 scan = Load(scan_);
    const ScanTerms terms(scan, Load(half_), Load(lower_));
    float low[kLanes], middle[kLanes], high[kLanes];
    Store(low, terms.low);
    Store(middle, terms.middle);
    Store(high, terms.high);
    for (int j = 0; j < n; ++j) {
      if (light_[j] > 0.0f) continue;
      heavy_.low += heavy_weight_[j] * low[j];
      heavy_.middle += heavy_weight_[j] * middle[j];
      heavy_.high += heavy_weight_[j] * high[j];
    }
    // e / τ = (w − w̃) / w
    const F32x16 gap = Sub(Sub(scan, Set1(s_.top)), Load(score_));
    const Mask16 light = Less(Set1(0.5f), Load(light_));
    const F32x16 error = Select(light, OneMinusExpAny(gap), Set1(0.0f));
    const F32x16 up = Log1pAny(Mul(Set1(-kUp), error));
    AddLanes(up_sum_, Sub(Set1(0.0f), up));
    AddLanes(down_sum_, Log1pAny(Mul(Set1(down_), error)));
    n_ = 0;
  }

  const CertifiedHead& a_;
  const LevelState& s_;
  const int g_;
  float down_;
  int n_ = 0;
  float scan_[kLanes], half_[kLanes], lower_[kLanes], score_[kLanes], light_[kLanes];
  double heavy_weight_[kLanes];
  ScanBounds heavy_ = {};
  double up_sum_[kLanes] = {}, down_sum_[kLanes] = {};
};

}  // namespace
}  // namespace certjax

#endif  // CERTJAX_KERNELS_DENOMINATOR_INL_H_
