// One level of one query head: sums of the sample, the claim, and how far the certificate is from
// it. Included after read-inl.h. The definitions and proofs are those of certjax/levels.py and
// certjax/certificate.py, function by function.
#ifndef CERTJAX_KERNELS_EVALUATE_INL_H_
#define CERTJAX_KERNELS_EVALUATE_INL_H_

#include "kernels/matrix-inl.h"

namespace certjax {
namespace {

// levels.Sums without the window, and what the next level is chosen from.
struct LevelSums {
  double exact, sampled, hat, t0, t1, t2, s0, s2, mass;
  int64_t keys;
  double first[2][kMaxHeadDim];  // Σ a y and Σ (1 − π) g² y, in lane order
};

// Sampled keys, of which 16 at a time are added up.
template <typename T>
class Summer {
 public:
  Summer(const CertifiedHead& head, int g, LevelSums* out)
      : a_(head), s_(head.state[g]), out_(out) {
    for (int x = 0; x < 2 * a_.head_dim; ++x) acc_[x] = 0.0f;
    for (F32x16& x : sum_) x = Set1(0.0f);
  }

  void Draw(int32_t key, float score, float log_size, float size, float square) {
    rows_.row[n_] = static_cast<const T*>(a_.value) + int64_t{key} * a_.head_dim;
    score_[n_] = score;
    log_size_[n_] = log_size;
    size_[n_] = size;
    square_[n_] = square;
    if (++n_ == kLanes) AddTile();
  }

  // Into double, so that float32 rounding does not grow with the sample.
  void Fold() {
    if (n_ > 0) AddTile();
    double* totals[9] = {&out_->exact, &out_->sampled, &out_->hat, &out_->t0,  &out_->t1,
                         &out_->t2,    &out_->s0,      &out_->s2,  &out_->mass};
    for (int x = 0; x < 9; ++x) {
      *totals[x] += SumLanes(sum_[x]);
      sum_[x] = Set1(0.0f);
    }
    for (int w = 0; w < 2; ++w) {
      for (int c = 0; c < a_.head_dim; ++c) {
        out_->first[w][c] += acc_[w * a_.head_dim + c];
        acc_[w * a_.head_dim + c] = 0.0f;
      }
    }
    tiles_ = 0;
  }

 private:
  void AddTile() {
    const int n = n_;
    const F32x16 zero = Set1(0.0f), one = Set1(1.0f);
    for (int j = n; j < kLanes; ++j) {  // lanes beyond n have weight 0
      score_[j] = -kInf;
      log_size_[j] = square_[j] = 0.0f;
      size_[j] = 1.0f;
    }
    const float cap = 4.0f * s_.scale_squared > kTiny ? 4.0f * s_.scale_squared : kTiny;
    const F32x16 log_pi = LogPi(score_, log_size_, s_.log_tau);
    const F32x16 size = Load(size_);
    const F32x16 size_square = Mul(size, size);
    const Mask16 light = Less(log_pi, zero);
    const F32x16 t = Sqrt(Fma(size, size, Set1(s_.offset * s_.offset)));
    const F32x16 heavy_weight = Select(light, zero, Exp(Load(score_)));
    const F32x16 drawn = FirstLanes(Div(Set1(Exp(s_.log_tau)), t), n, 0.0f);
    const F32x16 light_weight = Select(light, drawn, zero);
    const F32x16 weight = Add(heavy_weight, light_weight);
    const F32x16 capped = Min(Div(Load(square_), Set1(cap)), one);
    const F32x16 w2 = Mul(light_weight, light_weight);
    const F32x16 w2_capped = Mul(w2, capped);
    const F32x16 spread = Mul(OneMinusExp(Min(log_pi, zero)), w2);
    const F32x16 mass = Select(light, FirstLanes(one, n, 0.0f), Exp(log_pi));
    const F32x16 terms[9] = {
        heavy_weight,           light_weight, Mul(weight, capped),      w2,  w2_capped,
        Mul(w2_capped, capped), spread,       Mul(spread, size_square), mass};
    for (int x = 0; x < 9; ++x) sum_[x] = Add(sum_[x], terms[x]);
    float weights[2][kLanes];
    Store(weights[0], weight);
    Store(weights[1], spread);
    TileCentered<T, 2>(rows_, n, a_.head_dim, weights, a_.lane_center,
                       static_cast<float>(1 / a_.unit), acc_);
    out_->keys += n;
    n_ = 0;
    if (++tiles_ == 64) Fold();
  }

  const CertifiedHead& a_;
  const LevelState& s_;
  LevelSums* const out_;
  int n_ = 0, tiles_ = 0;
  Tile<T> rows_;
  float score_[kLanes], log_size_[kLanes], size_[kLanes], square_[kLanes];
  float acc_[2 * kMaxHeadDim];
  F32x16 sum_[9];
};

template <typename T>
void SumLevel(const CertifiedHead& a, int g, LevelSums* out) {
  Summer<T> summer(a, g, out);
  ForDrawn(a, g, [&](int64_t, int64_t at, int64_t own) {
    summer.Draw(a.index[at], a.score[own], a.log_size[own], a.size[at], a.square[at]);
  });
  summer.Fold();
}

// Event M: lower bound of M².
inline double ScaleSquaredLower(const LevelSums& s, const LevelState& h, double denominator,
                                double hat, double cap, double tau, double log_m) {
  const double lambda = 0.5 / (tau / h.size_min * kOutward);
  const double constant = lambda * s.t2 + log_m / lambda - hat;
  const double slope = denominator - 2 * lambda * s.t1;
  const double under = slope * slope - 4 * lambda * s.t0 * constant;
  const double root = __builtin_sqrt(under > 0.0 ? under : 0.0);
  const double sum = slope + root > kTiny ? slope + root : kTiny;
  return constant < 0.0 ? -2 * constant / sum * cap / (double{kOutward} * kOutward) : 0.0;
}

// The level passed, or another one follows, or none.
inline void Conclude(CertifiedHead& a, int g, const LevelSums& sums, double shortfall) {
  LevelState& s = a.state[g];
  const float epsilon = a.promise.epsilon;
  const bool passed = shortfall < 1.0;
  const double first_size = FirstSize(epsilon);
  const double needed = sums.mass * shortfall / first_size;
  s.sufficient = passed ? static_cast<float>(2 * __builtin_log2(needed > kTiny ? needed : kTiny))
                        : static_cast<float>(s.level);
  s.keys = sums.keys;
  s.certified = passed;
  // Small samples overstate the shortfall, so a long jump is damped.
  const double damped = shortfall > 1.0 ? shortfall < 1e6 ? shortfall : 1e6 : 1.0;
  const double doublings = __builtin_log2(damped);
  const int near = doublings < 2.0 ? static_cast<int>(__builtin_rint(doublings)) : 2;
  const int far = static_cast<int>(__builtin_rint(0.5 * doublings));
  const int jump = near > far ? near : far;
  const int next = s.level + (jump > 1 ? jump : 1);
  s.running = !passed && next < a.levels;
  const float keys = sums.keys > 1 ? static_cast<float>(sums.keys) : 1.0f;
  const float grown = keys * __builtin_exp2f(0.5f * static_cast<float>(next - s.level));
  const float most = LevelSize(next, epsilon);
  s.expected = passed ? keys : !s.running ? 0.0f : grown < most ? grown : most;
  if (s.running) SetLevel(s, next, static_cast<float>(first_size), a.reference[g]);
}

// ln(1 / δ_j)
inline double LogInverse(const CertifiedHead& a) {
  return __builtin_log(static_cast<double>(a.levels > 1 ? a.levels : 1)) -
         __builtin_log(double{a.promise.delta});
}

// evaluate_denominator of levels.py.
template <typename T>
void EvaluateDenominator(CertifiedHead& a, int g) {
  LevelState& s = a.state[g];
  const int H = a.head_dim;
  LevelSums sums = {};
  SumLevel<T>(a, g, &sums);
  const double weight = s.window_mass + sums.exact + sums.sampled;
  const double safe = weight > kTiny ? weight : kTiny;
  bool finite = true;
  for (int x = 0; x < H; ++x) {
    const int lane = x - x % kLanes + LaneOf<T>(x % kLanes);
    const double y = (a.window_first[g * H + lane] + sums.first[0][lane]) / safe;
    a.center[g * H + x] = static_cast<float>(y);
    finite = finite && __builtin_isfinite(a.center[g * H + x]);
  }

  IntervalSums scan(a, g);
  ForDrawn(a, g, [&](int64_t chunk, int64_t at, int64_t own) {
    scan.Draw(chunk, a.index[at], a.score[own], a.score[own] - s.log_tau < 0.0f);
  });
  const double log_inverse = LogInverse(a) + kLn2;
  const Interval d = scan.Finish(s.window_mass + sums.exact, Exp(s.log_tau), log_inverse);
  const double low = d.low / kOutward, high = d.high * kOutward;
  const double relative = (high - low) / (high + low);  // |middle − D| ≤ relative · D
  double shortfall = relative * kMargin / (a.promise.epsilon - s.rounding);
  // The rounding of both ends is relative to the scan's sum, which may overshoot D.
  const bool sane = finite && low > 1e-12 && high < 1e15 && s.scan.middle < 30 * low;
  if (!(sane && shortfall < 1e30)) shortfall = 1e30;
  s.denominator = static_cast<float>(2 * low * high / (low + high));
  s.scale_lower = 0.0f;
  s.bound = static_cast<float>((relative + s.rounding) / a.unit);  // no value: it has no unit
  Conclude(a, g, sums, shortfall);
}

template <typename T>
void RunEvaluate(CertifiedHead& a, int g) {
  if (a.promise.measure == kDenominator) return EvaluateDenominator<T>(a, g);
  LevelState& s = a.state[g];
  const int H = a.head_dim;
  const bool value = a.promise.measure == kValue;
  const float epsilon = a.promise.epsilon;
  const double allowed = epsilon - s.rounding;
  LevelSums sums = {};
  SumLevel<T>(a, g, &sums);

  const double tau = Exp(s.log_tau);
  const double cap = 4.0f * s.scale_squared > kTiny ? 4.0f * s.scale_squared : kTiny;
  double denominator = s.window_mass + sums.exact + sums.sampled;
  denominator = denominator > kTiny ? denominator : kTiny;
  const double spread_weight = sums.s0 > kTiny ? sums.s0 : kTiny;
  float* center = a.center + g * H;
  double size = 0.0, x0 = 0.0, far = 0.0, mean_square = 0.0, center_size = 0.0;
  for (int x = 0; x < H; ++x) {
    const int c = x % kLanes, lane = x - c + LaneOf<T>(c);
    const double y = (a.window_first[g * H + lane] + sums.first[0][lane]) / denominator;
    const double mean = sums.first[1][lane] / spread_weight;
    const double c0 = a.lane_center[lane];
    center[x] = static_cast<float>(y);
    size += (y + c0) * (y + c0);
    x0 += y * y;
    far += (y - mean) * (y - mean);
    mean_square += mean * mean;
    center_size += c0 * c0;
  }
  size = __builtin_sqrt(size) - s.center_rounding;  // ‖ô‖, from below
  size = size > 0.0 ? size : 0.0;
  x0 = __builtin_sqrt(x0);
  const double spread = sums.s2 * kOutward - sums.s0 * mean_square;

  const double log_inverse = LogInverse(a);
  const Shares& share = kShares[a.promise.full][value ? 0 : 1];
  const double log_z = log_inverse - __builtin_log(share.z1);
  const double log_v = log_inverse - __builtin_log(share.v1);
  double bound, scale_lower;
  if (value) {
    const double scale_squared = ScaleSquaredLower(sums, s, denominator, s.window_hat + sums.hat,
                                                   cap, tau, log_inverse - __builtin_log(share.m));
    // M of the true weights is a rounding away from that of the float32 ones.
    const double root = __builtin_sqrt(scale_squared) * (1 - s.rounding);
    const double by_output = allowed * size / (1 + allowed);
    bound = (allowed * root > by_output ? allowed * root : by_output) - s.center_rounding;
    const double by_size = (size - bound) * (1 - s.rounding);
    scale_lower = root > by_size ? root : by_size;
  } else {
    const double largest =
        s.radius + __builtin_sqrt(center_size);  // ≥ M: rounding is relative to it
    bound = epsilon * size / (1 + epsilon) - s.rounding * largest - s.center_rounding;
    scale_lower = size - bound > 0.0 ? (size - bound) * (1 - s.rounding) : 0.0;
  }

  const float tight = bound > kTiny ? static_cast<float>(bound) : kTiny;
  const double wide = s.radius + x0 < 2.0 * s.radius ? s.radius + x0 : 2.0 * s.radius;
  const float b_max = static_cast<float>(wide);
  float b[kGrid + 1];
  Grid(tight, b_max, b);
  // Tier 1: every interval of the grid must be refuted.
  const RangeFactor range(s);
  const F32x16 upper = Load(b + 1);
  const F32x16 largest = Largest(range, tau, x0, upper);
  const F32x16 limit = Max(Mul(largest, largest), Set1(kTiny));
  const F32x16 seen = SpreadUpper(sums.s0, spread > 0.0 ? spread : 0.0, __builtin_sqrt(far), upper);
  const F32x16 variance = Mul(limit, MeanUpper(Div(seen, limit), static_cast<float>(log_v)));
  const F32x16 ratio = Div(Max(Div(variance, largest), Set1(kTiny)), largest);
  const F32x16 distance = Mul(Load(b), Set1(static_cast<float>(denominator)));
  const F32x16 rate = Mul(ratio, Bennett(Div(Div(distance, largest), ratio)));
  float rates[kLanes];
  Store(rates, rate);
  float least = rates[0];
  bool number = true;
  for (float r : rates) {
    least = r < least ? r : least;
    number = number && r == r;
  }
  double shortfall = (log_z + kLn2) * kMargin / (least > kTiny ? least : kTiny);
  if (a.promise.full && !(shortfall < 1.0) && tight < b_max) {
    const double second = MatrixShortfall<T>(a, g, {tau, denominator, x0, log_inverse}, b);
    if (!(second >= shortfall)) shortfall = second;  // a NaN fails
  }
  if (tight >= b_max) shortfall = 0.0;  // ô and o are at most b_max apart
  // Outside this range squares may flush to zero or overflow: the level proves nothing.
  const double small = tau * Lane0(range(Set1(static_cast<float>(x0))));
  const double large = tau * Lane0(range(Set1(static_cast<float>(x0 + wide))));
  const bool sane = number && small > 1e-12 && large < 1e15 && denominator > 1e-12 &&
                    denominator < 1e15 && tight * denominator > 1e-12 && bound > 0.0 &&
                    __builtin_isfinite(bound + scale_lower + size);
  if (!(sane && shortfall < 1e30)) shortfall = 1e30;

  s.denominator = static_cast<float>(denominator);
  s.scale_lower = static_cast<float>(scale_lower);
  s.bound = static_cast<float>(bound + s.rounding * (s.radius + __builtin_sqrt(center_size)) +
                               s.center_rounding);
  Conclude(a, g, sums, shortfall);
}

}  // namespace
}  // namespace certjax

#endif  // CERTJAX_KERNELS_EVALUATE_INL_H_
