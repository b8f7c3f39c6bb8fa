// Appends one token to one kv head and codes the block that it completes. Included after one of the
// lanes_*-inl.h, and the same on every level: no lanes are written out, the compiler may use them.
// The rule is encode_blocks of certjax/quantization.py; codes, scales and zeros agree bit for bit.
// (XLA divides by a broadcast array by multiplying with its inverse, so that is the rule here too.)
#ifndef CERTJAX_KERNELS_APPEND_INL_H_
#define CERTJAX_KERNELS_APPEND_INL_H_

#include "kernels/convert-inl.h"

namespace certjax {
namespace {

constexpr int kScaleBias = 107 << 3;  // 5 exponent and 3 mantissa bits; the byte 0 means 2⁻²⁰

// Smallest 8-bit step ≥ x ≥ 0, clipped to the largest one.
inline int EncodeScaleUp(float x) {
  const int byte = static_cast<int>((ToBits(x) + 0xFFFFF) >> 20) - kScaleBias;
  return byte < 0 ? 0 : byte > 255 ? 255 : byte;
}

inline float DecodeScale(int byte) {
  return FromBits(static_cast<uint32_t>(byte + kScaleBias) << 20);
}

// `low` for NaN.
inline float Clip(float x, float low, float high) { return x > low ? x < high ? x : high : low; }

// Upper bound of √square for a sum of H squares, with the slack of norm_up in quantization.py.
inline float NormUp(double square, int head_dim) {
  const float slack = static_cast<float>(1.0 + (head_dim + 8) * 0x1p-23);
  return F32Up(__builtin_sqrt(square)) * slack;
}

// Norms of x − center and of x, in double: no overflow, no underflow.
template <typename T>
inline void Norms(const T* x, const float* center, int head_dim, float* offset, float* whole) {
  double square[kLanes] = {}, centered[kLanes] = {};
  for (int c = 0; c < head_dim; c += kLanes) {
    for (int j = 0; j < kLanes; ++j) {
      const double v = ToF32(x[c + j]);
      const double d = v - center[c + j];
      square[j] += v * v;
      centered[j] += d * d;
    }
  }
  for (int j = 1; j < kLanes; ++j) {
    square[0] += square[j];
    centered[0] += centered[j];
  }
  *whole = NormUp(square[0], head_dim);
  *offset = NormUp(centered[0], head_dim);
}

// One channel of a block at a time would stride through memory; sixteen at a time fill a line.
template <typename T>
void EncodeBlock(const AppendHead& a, int64_t block) {
  const int H = a.head_dim;
  const int64_t first = block * kBlock;
  const T* keys = static_cast<const T*>(a.key) + first * H;
  uint8_t* scale_bytes = a.code_scale + block * H;
  int8_t* zeros = a.code_zero + block * H;
  double square[kBlock] = {};
  float ratio = 0.0f;
  uint8_t code[kBlock][kMaxHeadDim];

  for (int c = 0; c < H; c += kLanes) {
    float x[kBlock][kLanes];
    float weight[kLanes], low[kLanes], high[kLanes];
    float scale[kLanes], inverse[kLanes], zero[kLanes];
    float largest[kLanes] = {};
    for (int j = 0; j < kLanes; ++j) {
      int from = a.channel_order[c + j];
      from = from < 0 ? 0 : from >= H ? H - 1 : from;
      weight[j] = a.channel_weight[from];
      for (int i = 0; i < kBlock; ++i) x[i][j] = ToF32(keys[int64_t{i} * H + from]);
      low[j] = high[j] = x[0][j];
    }
    for (int i = 1; i < kBlock; ++i) {
      for (int j = 0; j < kLanes; ++j) {
        low[j] = x[i][j] < low[j] ? x[i][j] : low[j];
        high[j] = x[i][j] > high[j] ? x[i][j] : high[j];
      }
    }
    for (int j = 0; j < kLanes; ++j) {
      const float range = (high[j] - low[j]) * static_cast<float>(1.0 / 15);
      const float reach = __builtin_fabsf(low[j]) * static_cast<float>(1.0 / 127);
      const int byte = EncodeScaleUp(range > reach ? range : reach);
      scale[j] = DecodeScale(byte);
      inverse[j] = 1.0f / scale[j];
      zero[j] = Clip(__builtin_floorf(low[j] / scale[j] + 0.5f), -128.0f, 127.0f);
      scale_bytes[c + j] = static_cast<uint8_t>(byte);
      zeros[c + j] = static_cast<int8_t>(zero[j]);
      if (a.scale_max[c + j] < byte) a.scale_max[c + j] = static_cast<uint8_t>(byte);
    }
    for (int i = 0; i < kBlock; ++i) {
      double part[kLanes];
      for (int j = 0; j < kLanes; ++j) {
        const float n = Clip(__builtin_rintf(x[i][j] * inverse[j]) - zero[j], 0.0f, 15.0f);
        const float decoded = scale[j] * (zero[j] + n);  // exact
        const float residual = __builtin_fabsf(x[i][j] - decoded);
        largest[j] = residual > largest[j] ? residual : largest[j];
        const double weighted = double{weight[j]} * (double{x[i][j]} - double{decoded});
        part[j] = weighted * weighted;
        code[i][c + j] = static_cast<uint8_t>(static_cast<int>(n));
      }
      for (int j = 0; j < kLanes; ++j) square[i] += part[j];
    }
    for (int j = 0; j < kLanes; ++j) {
      const float r = largest[j] / (0.5f * scale[j]);
      ratio = r > ratio ? r : ratio;
    }
  }
  // Line j of a group of 16 keys holds, for each key, positions 4 j … 4 j + 3 of the order in the
  // low nibbles and those of the second half in the high ones: four codes at a time.
  uint8_t* out = a.codes + block * kBlock * (H / 2);
  for (int first_key = 0; first_key < kBlock; first_key += kLanes) {
    for (int p = 0; p < H / 2; p += 4) {
      for (int i = first_key; i < first_key + kLanes; ++i, out += 4) {
        uint32_t low, high;
        memcpy(&low, &code[i][p], 4);
        memcpy(&high, &code[i][H / 2 + p], 4);
        low |= high << 4;
        memcpy(out, &low, 4);
      }
    }
  }
  a.residual_ratio[block] = ratio * static_cast<float>(1.0 + 0x1p-21);
  for (int i = 0; i < kBlock; ++i) a.residual_norm[first + i] = Bf16Up(NormUp(square[i], H));
}

template <typename T>
void RunAppendHead(const AppendHead& a) {
  const int H = a.head_dim;
  const int64_t at = a.position * H;
  memcpy(static_cast<T*>(a.key) + at, a.new_key, sizeof(T) * H);
  memcpy(static_cast<T*>(a.value) + at, a.new_value, sizeof(T) * H);
  float offset, whole;
  Norms(static_cast<const T*>(a.new_value), a.value_center, H, &offset, &whole);
  a.value_size[a.position] = Bf16Up(offset);
  a.value_norm[a.position] = Bf16Up(whole);
  Norms(static_cast<const T*>(a.new_key), a.value_center, H, &offset, &whole);
  if (whole > *a.key_norm_max) *a.key_norm_max = whole;
  if ((a.position + 1) % kBlock == 0) EncodeBlock<T>(a, a.position / kBlock);
}

template <typename T>
bool RunAllFinite(const void* x, int64_t count) {
  bool finite = true;
  for (int64_t i = 0; i < count; ++i) {
    finite &= __builtin_fabsf(ToF32(static_cast<const T*>(x)[i])) < __builtin_inff();
  }
  return finite;
}

}  // namespace
}  // namespace certjax

#endif  // CERTJAX_KERNELS_APPEND_INL_H_
