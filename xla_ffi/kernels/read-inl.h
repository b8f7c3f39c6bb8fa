// Read of a certified step: exact scores of the candidates, norms of the values that are sampled.
// The definition is certjax/reference.py and certjax/estimator.py.
#ifndef CERTJAX_KERNELS_READ_INL_H_
#define CERTJAX_KERNELS_READ_INL_H_

#include "kernels/plan-inl.h"

namespace certjax {
namespace {

constexpr uint16_t kHalfMinusInf = 0xFC00;

// E of 16 keys from 53 bits: `exponential` of perturbation.py.
inline F32x16 NoiseExact(const CertifiedHead& a, I32x16 index) {
  const I32x16 high = HashWord(index, a.words[0], a.words[1]);
  const I32x16 low = ShiftRight<11>(HashWord(index, a.words[2], a.words[3]));
  const auto unsigned_to_float = [](I32x16 x) {  // one rounding
    return Fma(ToFloat(ShiftRight<16>(x)), Set1(65536.0f), ToFloat(AndI(x, SetI(0xFFFF))));
  };
  const F32x16 step = Set1(0x1p-53f);
  const F32x16 one = Set1(1.0f);
  const F32x16 u = Fma(unsigned_to_float(high), Set1(0x1p-32f), Mul(Add(ToFloat(low), one), step));
  const I32x16 flipped = XorI(low, SetI(0x1FFFFF));
  const F32x16 not_u =
      Fma(unsigned_to_float(XorI(high, SetI(-1))), Set1(0x1p-32f), Mul(ToFloat(flipped), step));
  // Near U = 1 the logarithm is taken of the complement: −ln(1 − x) = ln(1 + x / (1 − x)).
  const F32x16 x = Min(not_u, Set1(0.5f));
  const F32x16 near = Log1p(Div(x, Sub(one, x)));
  const F32x16 far = Sub(Set1(0.0f), Log(u));
  const Mask16 upper_half = Less(ToFloat(high), Set1(0.0f));  // the sign bit
  return Select(upper_half, near, far);
}

// ln π = ln(w t / τ) of 16 candidates.
inline F32x16 LogPi(const float* score, const float* log_size, float log_tau) {
  return Sub(Add(Load(score), Load(log_size)), Set1(log_tau));
}

// Which of 16 candidates are in the sample of a query head.
inline uint32_t Drawn(F32x16 log_pi, const float* noise) {
  return ~Bits(Less(Add(log_pi, Load(noise)), Set1(0.0f))) & 0xFFFF;
}

// Calls fn(chunk, at, own) for every sampled candidate of a query head, by key: `at` is its place
// in the arrays of the kv head, `own` in those of the query head.
template <typename Fn>
inline void ForDrawn(const CertifiedHead& a, int g, Fn fn) {
  const int64_t chunks = Chunks(a);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int64_t base = chunk * kSegment;
    const int64_t own = base * a.group + g * kSegment;
    for (int i = 0; i < a.entries[chunk]; i += kLanes) {
      const F32x16 log_pi = LogPi(a.score + own + i, a.log_size + own + i, a.state[g].log_tau);
      for (uint32_t drawn = Drawn(log_pi, a.noise + base + i); drawn != 0; drawn &= drawn - 1) {
        const int j = i + __builtin_ctz(drawn);
        fn(chunk, base + j, own + j);
      }
    }
  }
}

// Query heads whose levels run.
struct Running {
  int head[kMaxGroup];
  int count = 0;

  explicit Running(const CertifiedHead& a) {
    for (int g = 0; g < a.group; ++g) {
      if (a.state[g].running) head[count++] = g;
    }
  }
};

// Lists the unread keys of a chunk that are candidates of this level or of the next ones.
inline void Collect(CertifiedHead& a, int64_t chunk, const Running& running, float per_unit) {
  const int G = a.group;
  const int64_t first = (FirstBlock(a) + chunk * kChunkBlocks) * kBlock;
  const int64_t end = (FirstBlock(a) + Blocks(a)) * kBlock;
  const int64_t last = first + kChunkKeys < end ? first + kChunkKeys : end;
  // ½ ln x from above: the bits of a float are a piecewise linear log2, from below up to 0.0861.
  const F32x16 slope = Set1(static_cast<float>(kHalfLn2 * 0x1p-23));
  const F32x16 intercept = Set1(static_cast<float>(kHalfLn2 * (0.0861 - 127) + 3e-5));
  int32_t* index = a.later_index + chunk * kSegment;
  float* bounds = a.later_bound + chunk * kSegment * G;
  const uint16_t* upper = a.upper + (first - FirstBlock(a) * kBlock) * G;
  int count = 0;
  for (int64_t key = first; key < last; key += kLanes, upper += G * kLanes) {
    const F32x16 size = Mul(LoadBf16(a.value_size + key), Set1(per_unit));
    const F32x16 square = Mul(size, size);
    float lanes[kMaxGroup][kLanes];
    uint32_t low = 0xFFFF;
    for (int x = 0; x < running.count; ++x) {
      const LevelState& s = a.state[running.head[x]];
      const I32x16 bits = AsInt(Add(square, Set1(s.offset * s.offset)));
      const F32x16 log_size = Fma(ToFloat(bits), slope, intercept);
      const auto* half = reinterpret_cast<const F16*>(upper + running.head[x] * kLanes);
      const F32x16 bound = Add(Load(half), log_size);
      Store(lanes[x], bound);
      low &= Bits(Less(bound, Set1(s.deep)));
    }
    for (uint32_t found = ~low & 0xFFFF; found != 0; found &= found - 1) {
      const int j = __builtin_ctz(found);
      index[count] = static_cast<int32_t>(key) + j;
      for (int x = 0; x < running.count; ++x) {
        bounds[running.head[x] * kSegment + count] = lanes[x][j];
      }
      ++count;
    }
  }
  a.later[chunk] = count;
}

// Moves those of this level from the list to the candidates, by key; returns their number. They are
// read for all heads, so the scan's bound is not needed again.
inline int Filter(CertifiedHead& a, int64_t chunk, const Running& running, int count,
                  float per_unit) {
  const int G = a.group;
  int32_t* later = a.later_index + chunk * kSegment;
  float* bounds = a.later_bound + chunk * kSegment * G;
  int32_t* index = a.index + chunk * kSegment;
  float* sizes = a.size + chunk * kSegment;
  const int listed = a.later[chunk];
  int kept = 0;
  for (int i = 0; i < listed; i += kLanes) {
    uint32_t low = 0xFFFF;
    for (int x = 0; x < running.count; ++x) {
      const int g = running.head[x];
      low &= Bits(Less(Load(bounds + g * kSegment + i), Set1(a.state[g].filter)));
    }
    if (low == 0xFFFF && listed - i >= kLanes) {  // all stay
      StoreI(later + kept, LoadI(later + i));
      for (int x = 0; x < running.count; ++x) {
        float* bound = bounds + running.head[x] * kSegment;
        Store(bound + kept, Load(bound + i));
      }
      kept += kLanes;
      continue;
    }
    for (int j = 0; j < kLanes && i + j < listed; ++j) {
      const int32_t key = later[i + j];
      if (low >> j & 1) {
        later[kept] = key;
        for (int x = 0; x < running.count; ++x) {
          float* bound = bounds + running.head[x] * kSegment;
          bound[kept] = bound[i + j];
        }
        ++kept;
      } else {
        index[count] = key;
        sizes[count++] = FromBits(uint32_t{a.value_size[key]} << 16) * per_unit;
        const int64_t group = (key - FirstBlock(a) * kBlock) / kLanes;
        for (int g = 0; g < G; ++g) {
          a.upper[(group * G + g) * kLanes + key % kLanes] = kHalfMinusInf;
        }
      }
    }
  }
  a.later[chunk] = kept;
  return count;
}

template <typename T>
void RunRead(CertifiedHead& a, int64_t chunk) {
  const int G = a.group;
  const int H = a.head_dim;
  const float per_unit = static_cast<float>(1 / a.unit);
  const float size_unit = a.promise.measure == kDenominator ? 0.0f : per_unit;
  const int64_t base = chunk * kSegment;
  int32_t* index = a.index + base;
  float* score = a.score + base * G;
  float* log_size = a.log_size + base * G;
  const int old = a.entries[chunk];
  const Running running(a);
  if (a.collect) Collect(a, chunk, running, size_unit);
  const int count = Filter(a, chunk, running, old, size_unit);
  a.entries[chunk] = count;
  Tile<T> rows, next;
  if (count > old) PointAt(a.key, index + old, count - old, H, &rows);
  for (int i = old; i < count; i += kLanes) {
    const bool more = i + kLanes < count;
    if (more) PointAt(a.key, index + i + kLanes, count - i - kLanes, H, &next);
    GroupScores<T>(a, rows, more ? &next : nullptr, score + i, kSegment);
    Store(a.noise + base + i, NoiseExact(a, LoadI(index + i)));
    Store(a.square + base + i, Set1(-1.0f));
    const F32x16 size = Load(a.size + base + i);
    for (int g = 0; g < G; ++g) {
      const LevelState& s = a.state[g];
      float* at = score + g * kSegment + i;
      Store(at, Sub(Load(at), Set1(s.c)));
      const F32x16 square = Fma(size, size, Set1(s.offset * s.offset));
      Store(log_size + g * kSegment + i, Mul(Log(square), Set1(0.5f)));
    }
    rows = next;
  }
  for (int j = 0; j < kLanes; ++j) {  // padding is never sampled
    for (int g = 0; g < G; ++g) score[g * kSegment + count + j] = -kInf;
    for (int g = 0; g < G; ++g) log_size[g * kSegment + count + j] = 0.0f;
    a.noise[base + count + j] = 0.0f;
  }

  // Values that a running head samples and none did before.
  int wanted[kChunkKeys];
  int32_t keys[kChunkKeys];
  int n = 0;
  for (int i = 0; i < count; i += kLanes) {
    uint32_t found = 0;
    for (int x = 0; x < running.count; ++x) {
      const int g = running.head[x];
      const int64_t at = g * kSegment + i;
      const F32x16 log_pi = LogPi(score + at, log_size + at, a.state[g].log_tau);
      found |= Drawn(log_pi, a.noise + base + i);
    }
    found &= Bits(Less(Load(a.square + base + i), Set1(0.0f)));
    if (count - i < kLanes) found &= (1u << (count - i)) - 1;
    for (; found != 0; found &= found - 1) {
      wanted[n] = i + __builtin_ctz(found);
      keys[n] = index[wanted[n]];
      ++n;
    }
  }
  if (n > 0) PointAt(a.value, keys, n, H, &rows);
  for (int i = 0; i < n; i += kLanes) {
    const bool more = i + kLanes < n;
    if (more) PointAt(a.value, keys + i + kLanes, n - i - kLanes, H, &next);
    float lanes[kLanes];
    Store(lanes, TileSquares<T>(rows, more ? &next : nullptr, H, per_unit));
    for (int j = 0; j < kLanes && i + j < n; ++j) a.square[base + wanted[i + j]] = lanes[j];
    rows = next;
  }
}

}  // namespace
}  // namespace certjax

#endif  // CERTJAX_KERNELS_READ_INL_H_
