// The scan of a certified step: upper bounds of all pool scores, perturbed, from the 4-bit codes.
// Included after one of the lanes_*-inl.h. Bounds and their proofs: certjax/quantization.py.
#ifndef CERTJAX_KERNELS_SCAN_INL_H_
#define CERTJAX_KERNELS_SCAN_INL_H_

#include "kernels/append-inl.h"
#include "kernels/denominator-inl.h"
#include "kernels/dense_decode-inl.h"

namespace certjax {
namespace {

constexpr int kAhead = 4096;  // bytes of codes between what is read and what is prefetched

// Exact scores of up to 16 rows for all heads of the group, [G, stride]; writes 16 of each.
template <typename T>
inline void GroupScores(const CertifiedHead& a, const Tile<T>& rows, const Tile<T>* ahead,
                        float* score, int64_t stride) {
  const int H = a.head_dim;
  ByHeads(a.group, [&](auto heads, int g) {
    F32x16 s[heads.value];
    TileScores<T, heads.value>(a.lane_query + g * H, rows, g == 0 ? ahead : nullptr, 0, H, s);
    for (int x = 0; x < heads.value; ++x) Store(score + (g + x) * stride, s[x]);
  });
}

// Key i of the window.
inline int64_t WindowKey(const CertifiedHead& a, int64_t i) {
  const int64_t sinks = a.pool_begin - a.attend_begin;
  return i < sinks ? a.attend_begin + i : a.pool_end + i - sinks;
}

// Rows i … i + n − 1 of the window, 1 ≤ n ≤ 16; lanes beyond repeat the last.
template <typename T>
inline Tile<T> WindowTile(const CertifiedHead& a, const void* data, int64_t i, int n) {
  Tile<T> rows;
  for (int j = 0; j < kLanes; ++j) {
    const int64_t key = WindowKey(a, i + (j < n ? j : n - 1));
    rows.row[j] = static_cast<const T*>(data) + key * a.head_dim;
  }
  return rows;
}

// The int8 query, exact scores of the window, and the reference that upper bounds are relative to.
template <typename T>
void RunPrepare(CertifiedHead& a) {
  const int G = a.group;
  const int H = a.head_dim;
  const double gamma = (H + 32) * 0x1p-23;
  for (int g = 0; g < G; ++g) {
    const float* query = a.query + g * H;
    float reach[2] = {1e-30f, 1e-30f};
    double square = 0.0;
    for (int c = 0; c < H; ++c) {
      int from = a.channel_order[c];
      from = from < 0 ? 0 : from >= H ? H - 1 : from;
      const float q = query[from];
      a.ordered[g * H + c] = q;
      const float r = __builtin_fabsf(q) * DecodeScale(a.scale_max[c]);
      float& largest = reach[c >= H / 2];
      if (r > largest) largest = r;
      const double w = double{query[c]} / double{a.channel_weight[c]};
      square += w * w;
      a.lane_query[g * H + c - c % kLanes + LaneOf<T>(c % kLanes)] = query[c];
    }
    for (int c = 0; c < H; ++c) {
      const float step = reach[c >= H / 2] / 127.0f;
      a.minus_step[g * H + c] = -step;
      a.inverse_step[g * H + c] = 1.0f / step;
    }
    a.residual_weight[g] = F32Up(NormUp(square, H) * (1 + 4 * gamma));
  }
  double center_square = 0.0;
  for (int c = 0; c < H; ++c) center_square += double{a.value_center[c]} * a.value_center[c];
  a.center_norm = NormUp(center_square, H);
  const int64_t window = WindowKeys(a);
  float score[kMaxGroup * kLanes];
  for (int64_t i = 0; i < window; i += kLanes) {
    const int n = window - i < kLanes ? static_cast<int>(window - i) : kLanes;
    GroupScores<T>(a, WindowTile<T>(a, a.key, i, n), nullptr, score, kLanes);
    for (int g = 0; g < G; ++g) {
      const float top = MaxLanes(FirstLanes(Load(score + g * kLanes), n, -kInf));
      if (i == 0 || top > a.reference[g]) a.reference[g] = top;
      memcpy(a.window_score + g * window + i, score + g * kLanes, n * sizeof(float));
    }
  }
  if (window == 0) {  // any score will do
    Tile<T> last;
    for (const T*& row : last.row) row = static_cast<const T*>(a.key) + (a.pool_end - 1) * H;
    GroupScores<T>(a, last, nullptr, score, kLanes);
    for (int g = 0; g < G; ++g) a.reference[g] = score[g * kLanes];
  }
  a.window_size_max = 0.0f;
  for (int64_t i = 0; i < window; ++i) {
    const float size = FromBits(uint32_t{a.value_size[WindowKey(a, i)]} << 16);
    if (size > a.window_size_max) a.window_size_max = size;
  }
}

inline F32x16 LoadBf16(const uint16_t* p) { return AsFloat(ShiftLeft<16>(LoadI(p))); }

inline I32x16 Mix(I32x16 x) {
  x = MulI(XorI(x, ShiftRight<16>(x)), SetI(0x7FEB352D));
  x = MulI(XorI(x, ShiftRight<15>(x)), SetI(static_cast<int32_t>(0x846CA68B)));
  return XorI(x, ShiftRight<16>(x));
}

inline I32x16 HashWord(I32x16 index, uint32_t first, uint32_t second) {
  const I32x16 once = Mix(XorI(index, SetI(static_cast<int32_t>(first))));
  return Mix(XorI(once, SetI(static_cast<int32_t>(second))));
}

// At least E of keys index … : −ln U from the upper 31 bits of U. The bits of a float are a
// piecewise linear log2 from below, up to 0.087; 2e-5 covers the roundings.
inline F32x16 NoiseUpper(const CertifiedHead& a, I32x16 index) {
  const I32x16 high = HashWord(index, a.words[0], a.words[1]);
  const F32x16 linear = ToFloat(AsInt(ToFloat(ShiftRight<1>(high))));
  return Fma(linear, Set1(-0x1.62e43p-24f), Set1(158 * 0x1.62e43p-1f + 2e-5f));
}

// Per head and block: the int8 query and what turns its dots into bounds.
struct BlockQuery {
  int8_t query[kMaxGroup * kMaxHeadDim];
  float base[kMaxGroup];      // estimate of a key with dots 0, relative to the reference
  float rounding[kMaxGroup];  // half-width that every key has
  float by_step[kMaxGroup];   // residual at most this
};

inline void QuantizeQuery(const CertifiedHead& a, int64_t block, BlockQuery* out) {
  const int G = a.group;
  const int H = a.head_dim;
  float scale[kMaxHeadDim];
  float zero[kMaxHeadDim];
  for (int c = 0; c < H; c += kLanes) {
    const I32x16 byte = LoadI(a.code_scale + block * H + c);
    Store(scale + c, AsFloat(ShiftLeft<20>(AddI(byte, SetI(kScaleBias)))));
    Store(zero + c, ToFloat(LoadI(a.code_zero + block * H + c)));
  }
  float folded[4 * kMaxGroup + 12][8];  // sums of 16 rows at a time
  for (int g = 0; g < G; ++g) {
    F32x16 base = Set1(0.0f), rest = base, rest_size = base, size = base;
    for (int c = 0; c < H; c += kLanes) {
      const int at = g * H + c;
      const F32x16 p = Mul(Load(a.ordered + at), Load(scale + c));
      const I32x16 n = ToInt(Clamp(Mul(p, Load(a.inverse_step + at)), -127.0f, 127.0f));
      StoreI8(out->query + at, n);
      const F32x16 r = Fma(ToFloat(n), Load(a.minus_step + at), p);
      base = Fma(p, Load(zero + c), base);
      rest = Add(rest, r);
      rest_size = Add(rest_size, Abs(r));
      size = Add(size, Abs(p));
    }
    StoreFolded(folded[4 * g], base);
    StoreFolded(folded[4 * g + 1], rest);
    StoreFolded(folded[4 * g + 2], rest_size);
    StoreFolded(folded[4 * g + 3], size);
  }
  const float gamma = static_cast<float>((H + 32) * 0x1p-23);
  const float wider = 1.0f + 4.0f * gamma;
  const float half_ratio = 0.5f * a.residual_ratio[block];
  for (int g = 0; g < G; g += 4) {
    float sum[kLanes];
    Store(sum, SumFolded(folded[4 * g]));
    for (int x = g; x < g + 4 && x < G; ++x) {
      const float* s = sum + 4 * (x - g);
      out->base[x] = s[0] + 7.5f * s[1] - a.reference[x];
      out->rounding[x] = (7.5f * s[2] + 144.0f * gamma * s[3]) * wider;
      out->by_step[x] = half_ratio * s[3] * wider;
    }
  }
}

// Dots of 16 keys for all heads of the group.
inline void GroupDots(const uint8_t* codes, int head_dim, int group, const int8_t* query,
                      int32_t (*dots)[2][kLanes]) {
  const int lines = head_dim / 8;
  for (int g = 0; g < group; g += 4) {
    const int8_t* q = query + g * head_dim;
    switch (group - g) {
      case 1:
        DotCodes<1>(codes, lines, q, head_dim, dots + g);
        break;
      case 2:
        DotCodes<2>(codes, lines, q, head_dim, dots + g);
        break;
      case 3:
        DotCodes<3>(codes, lines, q, head_dim, dots + g);
        break;
      default:
        DotCodes<4>(codes, lines, q, head_dim, dots + g);
    }
  }
}

// Largest and smallest ν of the chunk's pool keys, and the unit that goes with them.
inline void ChunkSizes(const CertifiedHead& a, int64_t first, int64_t last, ScanChunk* out) {
  first = first < a.pool_begin ? a.pool_begin : first;
  last = last > a.pool_end ? a.pool_end : last;
  I32x16 low = SetI(0xFFFF), high = SetI(0);
  int64_t k = first;
  for (; k + kLanes <= last; k += kLanes) {
    const I32x16 v = LoadI(a.value_size + k);
    low = MinI(low, v);
    high = MaxI(high, v);
  }
  int32_t lows[kLanes], highs[kLanes];
  StoreI(lows, low);
  StoreI(highs, high);
  for (int j = 0; k + j < last; ++j) {
    const int32_t v = a.value_size[k + j];
    lows[j] = v < lows[j] ? v : lows[j];
    highs[j] = v > highs[j] ? v : highs[j];
  }
  for (int j = 1; j < kLanes; ++j) {
    lows[0] = lows[j] < lows[0] ? lows[j] : lows[0];
    highs[0] = highs[j] > highs[0] ? highs[j] : highs[0];
  }
  out->size_min = FromBits(static_cast<uint32_t>(lows[0]) << 16);
  out->size_max = FromBits(static_cast<uint32_t>(highs[0]) << 16);
}

// A power of two above x, so that squares in its units neither over- nor underflow; 1 for what is
// out of float32's comfortable range.
inline double UnitAbove(double x) {
  if (!(x > 1e-30 && x < 1e30)) return 1.0;
  uint64_t bits;
  memcpy(&bits, &x, 8);
  bits = ((bits >> 52) + 2) << 52;
  memcpy(&x, &bits, 8);
  return x;
}

// Which keys enter the predictions, and how often: prediction_weights of estimator.py.
inline bool Predicted(int64_t block, int group16) { return block == 0 || group16 == 0; }

// `keep`: the estimates and half-widths of all keys too, for the measure "denominator".
template <bool keep>
void ScanOf(CertifiedHead& a, int64_t chunk) {
  const int G = a.group;
  const int H = a.head_dim;
  const int64_t begin = FirstBlock(a) + chunk * kChunkBlocks;
  const int64_t stop = FirstBlock(a) + Blocks(a);
  const int64_t end = begin + kChunkBlocks < stop ? begin + kChunkBlocks : stop;
  ScanChunk& result = a.chunk[chunk];
  ChunkSizes(a, begin * kBlock, end * kBlock, &result);
  float* estimates = a.estimate + chunk * (kChunkBlocks + 3) * G * kLanes;
  float* estimate = estimates;
  F32x16 lower[kMaxGroup];
  for (int g = 0; g < G; ++g) lower[g] = Set1(-kInf);
  BlockQuery query;
  int32_t dots[kMaxGroup][2][kLanes];

  for (int64_t b = begin; b < end; ++b) {
    QuantizeQuery(a, b, &query);
    for (int j = 0; j < kBlock / kLanes; ++j) {
      const int64_t key = b * kBlock + j * kLanes;
      const uint8_t* codes = a.codes + key * (H / 2);
      for (int x = 0; x < 8 * H; x += 64) __builtin_prefetch(codes + kAhead + x, 0, 2);
      GroupDots(codes, H, G, query.query, dots);
      const F32x16 noise = NoiseUpper(a, AddI(SetI(static_cast<int32_t>(key)), Iota()));
      const F32x16 norm = LoadBf16(a.residual_norm + key);
      const bool whole = key >= a.pool_begin && key + kLanes <= a.pool_end;
      const bool predicted = Predicted(b, j);
      uint16_t* upper = a.upper + (key - FirstBlock(a) * kBlock) * G;
      for (int g = 0; g < G; ++g) {
        F32x16 e = Fma(ToFloat(LoadI(dots[g][0])), Set1(-a.minus_step[g * H]), Set1(query.base[g]));
        e = Fma(ToFloat(LoadI(dots[g][1])), Set1(-a.minus_step[g * H + H / 2]), e);
        const F32x16 by_norm = Mul(norm, Set1(a.residual_weight[g]));
        // By the norm first: it is NaN where 0 · inf, and the other one counts then.
        const F32x16 half = Add(Min(by_norm, Set1(query.by_step[g])), Set1(query.rounding[g]));
        F32x16 low = Sub(e, half);
        F32x16 up = Add(Add(e, half), noise);
        if (!whole) {
          const F32x16 at = Add(ToFloat(Iota()), Set1(0.5f));
          const Mask16 before = Less(at, Set1(static_cast<float>(a.pool_begin - key)));
          const Mask16 inside = Less(at, Set1(static_cast<float>(a.pool_end - key)));
          const auto pool = [&](F32x16 x) {
            return Select(before, Set1(-kInf), Select(inside, x, Set1(-kInf)));
          };
          e = pool(e);
          low = pool(low);
          up = pool(up);
        }
        lower[g] = Max(low, lower[g]);
        StoreHalfUp(upper + g * kLanes, up);
        if (keep) {
          const int64_t at = (key - FirstBlock(a) * kBlock) * G + g * kLanes;
          Store(a.scan_score + at, e);
          Store(a.half_width + at, Select(Less(e, Set1(-kHuge)), Set1(0.0f), half));
        }
        if (predicted) Store(estimate + g * kLanes, e);
      }
      if (predicted) estimate += G * kLanes;
    }
  }

  // Predictions, while everything is near.
  result.unit = UnitAbove(double{result.size_max} + a.center_norm);
  const F32x16 per_unit = Set1(static_cast<float>(1 / result.unit));
  F32x16 mass[kMaxGroup], second[kMaxGroup], squares[kMaxGroup];
  for (int g = 0; g < G; ++g) {
    result.head[g].lower = MaxLanes(lower[g]);
    mass[g] = second[g] = squares[g] = Set1(0.0f);
  }
  estimate = estimates;
  for (int64_t b = begin; b < end; ++b) {
    for (int j = 0; j < kBlock / kLanes; ++j) {
      if (!Predicted(b, j)) continue;
      const int64_t key = b * kBlock + j * kLanes;
      const F32x16 count = Set1(b == 0 ? 1.0f : 4.0f);
      const F32x16 size = Mul(LoadBf16(a.value_size + key), per_unit);
      const F32x16 norm = Mul(LoadBf16(a.value_norm + key), per_unit);
      const F32x16 size2 = Mul(size, size);
      const F32x16 norm2 = Mul(norm, norm);
      for (int g = 0; g < G; ++g, estimate += kLanes) {
        const F32x16 x = Sub(Load(estimate), Set1(result.head[g].lower));
        const F32x16 w = Mul(count, Exp(x));
        mass[g] = Add(mass[g], w);
        second[g] = Fma(w, size2, second[g]);
        squares[g] = Fma(w, norm2, squares[g]);
      }
    }
  }
  for (int g = 0; g < G; ++g) {
    result.head[g].mass = SumLanes(mass[g]);
    result.head[g].second = SumLanes(second[g]);
    result.head[g].squares = SumLanes(squares[g]);
  }
  if (keep) SumScan(a, chunk);
}

void RunScan(CertifiedHead& a, int64_t chunk) {
  if (a.promise.measure == kDenominator) {
    ScanOf<true>(a, chunk);
  } else {
    ScanOf<false>(a, chunk);
  }
}

}  // namespace
}  // namespace certjax

#endif  // CERTJAX_KERNELS_SCAN_INL_H_
