// Tier 2 of the certificate: the mixture bound, with a matrix of second moments of the sample.
// Included after one of the lanes_*-inl.h. The definitions and proofs are those of
// matrix_shortfall in certjax/certificate.py and matrix_sums in certjax/levels.py.
#ifndef CERTJAX_KERNELS_MATRIX_INL_H_
#define CERTJAX_KERNELS_MATRIX_INL_H_

#include "kernels/bounds-inl.h"
#include "kernels/read-inl.h"

namespace certjax {
namespace {

constexpr double kKappa = 15.0;

// FRACTIONS of certificate.py.
struct Shares {
  double z1, v1, z2, v2, s2, m;
};
constexpr Shares kShares[2][2] = {
    {{0.5, 0.4, 0, 0, 0, 0.1}, {0.55, 0.45, 0, 0, 0, 0}},
    {{0.25, 0.2, 0.22, 0.13, 0.1, 0.1}, {0.28, 0.22, 0.25, 0.14, 0.11, 0}},
};

// out[i][j] += Σ_k x[k][i] y[k][j], k < n, for j from 16 ⌊i / 16⌋ on: the upper triangle and a bit.
inline void AddProduct(const float* x, const float* y, int n, int H, float* out) {
  for (int i = 0; i < H; i += kAccumulators) {
    for (int c = i - i % kLanes; c < H; c += kLanes) {
      F32x16 sum[kAccumulators];
      for (F32x16& s : sum) s = Set1(0.0f);
      for (int k = 0; k < n; ++k) {
        const F32x16 row = Load(y + k * H + c);
        for (int r = 0; r < kAccumulators; ++r) {
          sum[r] = Fma(Set1(x[k * H + i + r]), row, sum[r]);
        }
      }
      for (int r = 0; r < kAccumulators; ++r) {
        float* p = out + (i + r) * H + c;
        Store(p, Add(Load(p), sum[r]));
      }
    }
  }
}

// The lower triangle from the upper one.
inline void Mirror(float* x, int H) {
  for (int i = 0; i < H; ++i) {
    for (int j = 0; j < i; ++j) x[i * H + j] = x[j * H + i];
  }
}

// out = x x for a symmetric x.
inline void Square(const float* x, int H, float* out) {
  for (int i = 0; i < H * H; ++i) out[i] = 0.0f;
  AddProduct(x, x, H, H, out);
  Mirror(out, H);
}

// (tr C⁸)^(1/8) ≥ λ_max(C) of the positive semidefinite matrix with this upper triangle.
// `work`: [2, H, H].
inline double LargestEigenvalueUpper(const double* matrix, int H, float* work) {
  double trace = 0.0;
  for (int i = 0; i < H; ++i) trace += matrix[i * H + i];
  trace = trace > kTiny ? trace : kTiny;
  float *power = work, *next = work + H * H;
  for (int i = 0; i < H * H; ++i) power[i] = static_cast<float>(matrix[i] / trace);
  Mirror(power, H);
  Square(power, H, next);
  Square(next, H, power);
  double sum = 0.0;
  for (int i = 0; i < H; ++i) {
    F32x16 row = Set1(0.0f);
    for (int c = 0; c < H; c += kLanes) {
      const F32x16 x = Load(power + i * H + c);
      row = Fma(x, x, row);
    }
    sum += SumLanes(row);
  }
  const double eighth = __builtin_sqrt(__builtin_sqrt(__builtin_sqrt(sum)));
  const double share = eighth * kOutward + 1e-6;
  return trace * (share < kOutward ? share : kOutward);
}

// Σ ω, Σ ω (v − ô) in lane order and Σ ω ν² over the light keys drawn.
struct Moments {
  double weight, second;
  double first[kMaxHeadDim];

  // Σ ω ‖v − o‖² at most, over all o within b of ô = c0 + `center` (in lane order).
  F32x16 SpreadUpperAt(const double* center, int H, F32x16 b) const {
    const double safe = weight > kTiny ? weight : kTiny;
    double mean_square = 0.0, far = 0.0;
    for (int c = 0; c < H; ++c) {
      const double off = first[c] / safe;
      mean_square += (center[c] + off) * (center[c] + off);
      far += off * off;
    }
    const double scatter = second * kOutward - weight * mean_square;
    return SpreadUpper(weight, scatter > 0.0 ? scatter : 0.0, __builtin_sqrt(far), b);
  }
};

// Moments of ω = (1 − π)² g² and ω = (2 − π) g², and of the latter the matrix about ô: ô is known,
// so nothing has to cancel.
template <typename T>
class MatrixSums {
 public:
  MatrixSums(CertifiedHead& head, int g)
      : a_(head),
        s_(head.state[g]),
        H_(head.head_dim),
        total_(head.scatter + int64_t{g} * H_ * H_),
        part_(head.scatter_part + int64_t{g} * 2 * H_ * H_),
        rows_y_(head.scatter_rows + int64_t{g} * 2 * kLanes * H_),
        rows_wy_(rows_y_ + kLanes * H_) {
    for (int x = 0; x < H_; ++x) {
      const int c = x % kLanes, lane = x - c + LaneOf<T>(c);
      center[lane] = head.center[g * H_ + x];
      about_[lane] = head.lane_center[lane] + head.center[g * H_ + x];
    }
    for (int i = 0; i < H_ * H_; ++i) total_[i] = part_[i] = 0.0f;
    for (int i = 0; i < 2 * H_; ++i) acc_[i] = 0.0f;
    for (F32x16& x : sum_) x = Set1(0.0f);
  }

  void Draw(int32_t key, float log_pi, float size) {
    if (!(log_pi < 0.0f)) return;  // heavy
    rows_.row[n_] = static_cast<const T*>(a_.value) + int64_t{key} * H_;
    log_pi_[n_] = log_pi;
    size_[n_] = size;
    if (++n_ == kLanes) AddTile();
  }

  // Into double, so that float32 rounding does not grow with the sample.
  void Fold() {
    if (n_ > 0) AddTile();
    for (int w = 0; w < 2; ++w) {
      moments[w].weight += SumLanes(sum_[2 * w]);
      moments[w].second += SumLanes(sum_[2 * w + 1]);
      for (int c = 0; c < H_; ++c) moments[w].first[c] += acc_[w * H_ + c];
    }
    for (int i = 0; i < H_; ++i) {
      for (int j = i - i % kLanes; j < H_; ++j) {
        total_[i * H_ + j] += part_[i * H_ + j];
        part_[i * H_ + j] = 0.0f;
      }
    }
    for (int i = 0; i < 2 * H_; ++i) acc_[i] = 0.0f;
    for (F32x16& x : sum_) x = Set1(0.0f);
    tiles_ = 0;
  }

  double LargestEigenvalue() { return LargestEigenvalueUpper(total_, H_, part_); }

  Moments moments[2] = {};
  double center[kMaxHeadDim];  // ô − c0, in lane order

 private:
  void AddTile() {
    const int n = n_;
    for (int j = n; j < kLanes; ++j) {  // lanes beyond n have weight 0
      log_pi_[j] = 0.0f;
      size_[j] = 1.0f;
    }
    const float per_unit = static_cast<float>(1 / a_.unit);
    const F32x16 size = Load(size_);
    const F32x16 size_square = Mul(size, size);
    const F32x16 t = Sqrt(Fma(size, size, Set1(s_.offset * s_.offset)));
    const F32x16 weight = FirstLanes(Div(Set1(Exp(s_.log_tau)), t), n, 0.0f);
    const F32x16 square = Mul(weight, weight);
    const F32x16 miss = OneMinusExp(Load(log_pi_));
    const F32x16 one = Mul(Mul(miss, miss), square);
    const F32x16 two = Mul(Add(Set1(1.0f), miss), square);
    const F32x16 terms[4] = {one, Mul(one, size_square), two, Mul(two, size_square)};
    for (int x = 0; x < 4; ++x) sum_[x] = Add(sum_[x], terms[x]);
    float weights[2][kLanes];
    Store(weights[0], one);
    Store(weights[1], two);
    TileCentered<T, 2>(rows_, n, H_, weights, about_, per_unit, acc_);
    for (int k = 0; k < n; ++k) {
      for (int c = 0; c < H_; c += kLanes) {
        const F32x16 y = Sub(Mul(Load(rows_.row[k] + c), Set1(per_unit)), Load(about_ + c));
        Store(rows_y_ + k * H_ + c, y);
        Store(rows_wy_ + k * H_ + c, Mul(Set1(weights[1][k]), y));
      }
    }
    AddProduct(rows_wy_, rows_y_, n, H_, part_);
    n_ = 0;
    if (++tiles_ == 64) Fold();
  }

  const CertifiedHead& a_;
  const LevelState& s_;
  const int H_;
  double* const total_;
  float *const part_, *const rows_y_, *const rows_wy_;
  int n_ = 0, tiles_ = 0;
  Tile<T> rows_;
  float log_pi_[kLanes], size_[kLanes];
  float about_[kMaxHeadDim], acc_[2 * kMaxHeadDim];
  F32x16 sum_[4];
};

// What tier 2 needs of the level besides the matrix.
struct LevelFacts {
  double tau, denominator, x0, log_inverse;
};

// Certified where the result is below 1; may be NaN. `b`: [kGrid + 1].
template <typename T>
double MatrixShortfall(CertifiedHead& a, int g, const LevelFacts& level, const float* b) {
  const LevelState& s = a.state[g];
  const int H = a.head_dim;
  const bool value = a.promise.measure == kValue;
  MatrixSums<T> sums(a, g);
  ForDrawn(a, g, [&](int64_t, int64_t at, int64_t own) {
    sums.Draw(a.index[at], a.score[own] + a.log_size[own] - s.log_tau, a.size[at]);
  });
  sums.Fold();
  const Moments &first = sums.moments[0], &second = sums.moments[1];
  const Shares& share = kShares[1][value ? 0 : 1];
  const auto log_of = [&](double x) {
    return static_cast<float>(level.log_inverse - __builtin_log(x));
  };
  const RangeFactor range(s);
  const F32x16 two = Set1(2.0f), third = Set1(1.0f / 3), least = Set1(kTiny);
  const auto cap_at = [&](F32x16 x) {
    const F32x16 largest = Largest(range, level.tau, level.x0, x);
    return Max(Mul(two, Mul(largest, largest)), least);
  };

  // λ_max of C1 + C2 at the lower end of each interval (eigenvalue_upper).
  const F32x16 low = Load(b), high = Load(b + 1);
  const float root = static_cast<float>(__builtin_sqrt(sums.LargestEigenvalue()));
  const float root_weight = static_cast<float>(__builtin_sqrt(second.weight));
  const F32x16 shifted = Fma(low, Set1(root_weight), Set1(root));
  const F32x16 moved = Mul(Mul(shifted, shifted), Set1(kOutward));
  const F32x16 cap_low = cap_at(low);
  const F32x16 unseen = Mul(cap_low, MeanUpper(Div(moved, cap_low), log_of(share.s2)));
  const F32x16 top = Mul(Fma(moved, Set1(0.5f), unseen), third);

  // Their traces at the upper end.
  const F32x16 cap_high = cap_at(high);
  const F32x16 seen = second.SpreadUpperAt(sums.center, H, high);
  const F32x16 variance = Mul(cap_high, MeanUpper(Div(seen, cap_high), log_of(share.v2)));
  const F32x16 trace = Mul(Add(first.SpreadUpperAt(sums.center, H, high), variance), third);

  const double allowed = a.promise.epsilon - s.rounding;
  const double goal = allowed * s.predicted;
  const double scale = s.scale_squared > kTiny ? s.scale_squared : kTiny;
  const double log_z = level.log_inverse - __builtin_log(share.z2);
  double beta = goal * goal * scale / (kKappa * log_z);
  beta = beta > kTiny ? beta : kTiny;
  const int betas = value ? 1 : 4;  // ‖o‖ cannot be predicted: a grid of smoothings
  const float twice_log =
      static_cast<float>(2 * (log_z + __builtin_log(static_cast<double>(betas))));
  const F32x16 distance = Mul(low, Set1(static_cast<float>(level.denominator)));
  const F32x16 square = Max(Mul(distance, distance), least);
  double best = __builtin_inf();
  for (int i = 0; i < betas; ++i, beta *= 0.25) {
    const F32x16 smoothing = Set1(static_cast<float>(beta));
    const F32x16 ratio = Div(trace, Mul(smoothing, Set1(static_cast<float>(H))));
    // Log1p takes numbers only.
    const F32x16 growth = Select(Less(ratio, Set1(1e38f)), Log1p(ratio), Set1(kInf));
    const F32x16 bound =
        Mul(Add(smoothing, top), Fma(growth, Set1(static_cast<float>(H)), Set1(twice_log)));
    float shortfalls[kLanes];
    Store(shortfalls, Div(Mul(bound, Set1(kMargin)), square));
    double worst = 0.0;
    for (float x : shortfalls) worst = x <= worst ? worst : double{x};  // NaN wins, then stays
    best = worst >= best ? best : worst;
  }
  return best;
}

}  // namespace
}  // namespace certjax

#endif  // CERTJAX_KERNELS_MATRIX_INL_H_
