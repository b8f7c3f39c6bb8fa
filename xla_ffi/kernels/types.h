// Contract of the kernels: plain C++, no XLA, no Python, no threads, no allocation.
//
// Every function gives the same bits on every ISA level. The scalar level is the definition:
// sums run in a fixed order of 16 lanes, every fused multiply-add is explicit (the files are
// compiled with -ffp-contract=off), and exp is our own. Callers set the floating-point state to
// round-to-nearest with subnormals kept (handlers/parallel.h).
#ifndef CERTJAX_KERNELS_TYPES_H_
#define CERTJAX_KERNELS_TYPES_H_

#include <cstdint>

namespace certjax {

inline constexpr int kBlock = 64;        // keys that share one scale and one zero per channel
inline constexpr int kLanes = 16;        // floats in a vector, keys in a tile
inline constexpr int kMaxHeadDim = 512;  // a multiple of 16 up to this
inline constexpr int kMaxGroup = 16;     // query heads of one kv head

// How keys and values are stored. The numbers are the `storage` attribute of the FFI calls.
enum Storage : int { kBfloat16 = 0, kFloat16 = 1, kFloat32 = 2, kStorages = 3 };

// Dense attention of G query heads over n ≥ 1 consecutive keys of one kv head: an unnormalised
// partial result. For head g, with s_i = q_g · k_i and m = max s_i:
//
//   state[g] = {m, Σ e_i},  acc[g] = Σ e_i v_i,  e_i = exp(s_i − m).
//
// acc is in lane order: private to DenseChunk and DenseMerge. Loads need no alignment, rows beyond
// n are never read. f32 accumulation: sums of 16 keys, added up tile by tile.
struct DenseChunk {
  const float* query;  // [G, H], multiplied by the softmax scale
  const void* key;     // [n, H]
  const void* value;   // [n, H]
  int64_t n;
  int group, head_dim;
  float* acc;    // [G, H]
  float* state;  // [G, 2]
};

// Merges the partial results of consecutive chunks, in their order, in double.
struct DenseMerge {
  const float* acc;    // [chunks, G, H]
  const float* state;  // [chunks, G, 2]
  int64_t chunks;      // ≥ 0; 0 gives out = 0, log_normalizer = −inf
  int group, head_dim;
  float* out;             // [G, H]
  float* log_normalizer;  // [G]
};

// One kv head of one row of the cache and the token to append at `position` < capacity. All norms
// are upper bounds, whatever the magnitudes: squares are summed in double. The field meanings and
// the coding rule are those of certjax/types.py and certjax/quantization.py.
struct AppendHead {
  void *key, *value;                                  // [S, H]
  uint8_t* codes;                                     // [P, 4, H / 8, 64]
  uint8_t* code_scale;                                // [P, H]
  int8_t* code_zero;                                  // [P, H]
  float* residual_ratio;                              // [P]
  uint16_t *residual_norm, *value_size, *value_norm;  // [S]
  uint8_t* scale_max;                                 // [H]
  float* key_norm_max;                                // [1]
  const float *channel_weight, *value_center;         // [H]
  const int32_t* channel_order;                       // [H]; entries out of range are clamped
  const void *new_key, *new_value;                    // [H]
  int64_t position;
  int head_dim;
};

// One ISA level. Arrays are indexed by Storage.
struct Kernels {
  void (*dense_chunk[kStorages])(const DenseChunk&);
  void (*dense_merge[kStorages])(const DenseMerge&);
  void (*append_head[kStorages])(const AppendHead&);
  bool (*all_finite[kStorages])(const void*, int64_t count);
};

extern const Kernels kScalarKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

}  // namespace certjax

#endif  // CERTJAX_KERNELS_TYPES_H_
