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

// Keys of a dense task: part of the definition of the result, so independent of the number of
// threads. At d 128 about half a megabyte, 30 to 60 µs: far above the cost of scheduling, small
// enough to balance.
inline constexpr int64_t kDenseKeys = 1024;

// Merges the partial results of consecutive chunks, in their order, in double.
struct DenseMerge {
  const float* acc;    // [chunks, G, H]
  const float* state;  // [chunks, G, 2]
  int64_t chunks;      // ≥ 0; 0 gives out = 0, log_normalizer = −inf
  int group, head_dim;
  float* out;             // [G, H]
  float* log_normalizer;  // [G]
};

// Outputs begin … end − 1 of a product of R rows with a matrix: out[r, o] = Σ_i x[r, i] w[i, o].
//
// weight is [inputs, outputs], or [outputs, inputs] where transposed: then the whole sums, else
// those of one slab of inputs, first … last − 1, for ProjectMerge. f32 in a fixed order: of 8
// inputs, added up over a slab (the inputs beyond a multiple of 8 one by one); transposed of 16
// lanes over the inputs, folded at the end. |error| ≤ (n / 16 + 41) 2⁻²⁴ Σ |x w| to first order, n
// = inputs.
struct ProjectTask {
  const float* x;  // [R, inputs]
  const void* weight;
  int64_t rows, inputs, outputs;
  bool transposed;
  int64_t begin, end, first, last;
  float* out;  // [R, outputs]; for ProjectMerge in lane order, [R, outputs up to a multiple of 16]
};

// Inputs of a slab: part of the definition of the result, so independent of the number of threads.
inline constexpr int64_t kSlab = 256;

// Adds up the sums of the slabs, in their order.
struct ProjectMerge {
  float* sums;  // [slabs, R, outputs up to a multiple of 16], spoiled
  int64_t slabs, rows, outputs, begin, end;
  float* out;  // [R, outputs]
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

inline constexpr int kChunkBlocks = 64;                   // blocks of a scan task
inline constexpr int kChunkKeys = kChunkBlocks * kBlock;  // part of the definition of the result
inline constexpr int kSegment = kChunkKeys + kLanes;      // candidates of a chunk, padded

// What a certified step promises; the fields of certjax.Config.
enum Measure : int { kValue = 0, kOutput = 1, kDenominator = 2 };

struct Promise {
  float epsilon, delta;
  Measure measure;
  bool full;  // tier 2 of the certificate where tier 1 fails
};

// What the scan of a chunk says about one query head; sums are relative to exp(lower + reference),
// and to `unit`.
struct ScanSums {
  float lower;    // largest certain lower bound of a score, relative to the reference
  float mass;     // Σ w̃ over the predicted keys
  float second;   // Σ w̃ ν²
  float squares;  // Σ w̃ ‖v‖²
};

// What the scan knows of D, for the measure "denominator": w = exp(s) and its bounds, summed over
// the pool keys of a chunk relative to exp(lower + reference), or over all of them relative to
// exp(c).
struct ScanBounds {
  double low, middle, high;  // Σ of exp(s̃ − half-width), exp(s̃), exp(s̃ + half-width)
  float widest;              // half-width
};

struct ScanChunk {
  float size_min, size_max;  // of ν over the chunk's pool keys
  double unit;               // power of two
  ScanSums head[kMaxGroup];
};

// One query head while its levels run. Values are in the unit of the kv head.
struct LevelState {
  bool running, certified;
  int level;
  float c;                    // deterministic reference: weights are exp(s − c)
  float top;                  // c relative to the reference of the scan
  float offset;               // r0; 1 where z = w, with ν = 0
  float mass, scale_squared;  // predictions of Z and M²
  float predicted;            // prediction of D
  float log_tau;
  float filter;                      // candidates have upper + ln t at least this
  float deep;                        // the same some levels on: candidates are collected ahead
  float covered;                     // down to here they are
  float rounding;                    // of float32 arithmetic, relative to M
  float center_rounding;             // what the sums add, since they run over v − c0; absolute
  float size_max, size_min, radius;  // Range of certificate.py
  double window_mass, window_hat;    // Σ w and Σ w min(‖v‖² / cap, 1) over the window
  float expected;  // sample of the level that comes next; of the last one where certified
  float sufficient, bound, scale_lower, denominator;
  int64_t keys;
  ScanBounds scan;
};

// One kv head of one row in a certified step. Filled by the handler, then by the kernels in the
// order Prepare, Scan (chunks), Plan, { BeginRound, Read (chunks), Evaluate (query heads) }*. Chunk
// and head calls may run at the same time; what is marked with * they write only in their own part.
struct CertifiedHead {
  // The cache of this kv head; fields as in certjax/types.py.
  const void *key, *value;
  const uint8_t *codes, *code_scale;
  const int8_t* code_zero;
  const float* residual_ratio;
  const uint16_t *residual_norm, *value_size, *value_norm;
  const uint8_t* scale_max;
  const float *channel_weight, *value_center;
  const int32_t* channel_order;
  float key_norm_max;
  // The step. Pool: keys pool_begin … pool_end − 1, all in full blocks; the other attended keys are
  // the window.
  const float* query;  // [G, H], multiplied by the softmax scale
  int group, head_dim, levels;
  int64_t attend_begin, pool_begin, pool_end, attend_end, capacity;
  uint32_t words[4];  // of perturbation.py
  Promise promise;
  bool always_sample;  // never mind the cost
  // Workspace.
  float* ordered;        // [G, H] in channel order
  float* minus_step;     // [G, H], −step of the int8 query, and 1 / step
  float* inverse_step;   // [G, H]
  float* lane_query;     // [G, H] in lane order
  float* lane_center;    // [H] value centre in units, in lane order
  float* window_score;   // [G, window]
  float* window_square;  // [window] ‖v‖² in units
  double* window_first;  // [G, H] Σ w (v − c0), in lane order
  uint16_t* upper;       // * [pool groups of 16, G, 16] float16 upper bounds of s + E − reference
  float* estimate;       // * [chunks, kChunkBlocks + 3, G, 16]
  ScanChunk* chunk;      // * [chunks]
  int32_t* later;        // * [chunks] candidates of later levels, not read yet
  int32_t* later_index;  // * [chunks, kSegment] their keys
  float* later_bound;    // * [chunks, G, kSegment] their upper + ln t
  int32_t* entries;      // * [chunks] candidates read so far
  int32_t* index;        // * [chunks, kSegment] their keys
  float* size;           // * ν in units
  float* noise;          // * E
  float* square;         // * ‖v‖² in units; −1 where the value was not read
  float* score;          // * [chunks, G, kSegment] s − c
  float* log_size;       // * [chunks, G, kSegment] ln t
  float* center;         // * [G, H] ô − c0 in units
  // Where both tiers may certify.
  double* scatter;      // * [G, H, H] Σ (2 − π) g² (v − ô)(v − ô)ᵀ
  float* scatter_part;  // * [G, 2, H, H]
  float* scatter_rows;  // * [G, 2, 16, H]
  // Measure "denominator".
  float* scan_score;       // * [pool groups of 16, G, 16] s̃ − reference; −inf outside the pool
  float* half_width;       // * the same, |s − s̃| at most; 0 outside the pool
  ScanBounds* scan_chunk;  // * [chunks, G]
  float reference[kMaxGroup], residual_weight[kMaxGroup];
  float window_size_max;
  float center_norm;  // ‖c0‖ from above
  double unit;
  bool collect;  // this round looks at all keys again
  LevelState state[kMaxGroup];
};

// Before the Read calls of a round: whether it is worth while (go_on of certjax/cost.py), and
// whether what was collected ahead is enough.
inline bool BeginRound(CertifiedHead& a) {
  bool running = false;
  bool stop = false;
  float expected = 0.0f;
  a.collect = false;
  for (int g = 0; g < a.group; ++g) {
    stop |= !a.state[g].running && !a.state[g].certified;
    expected += a.state[g].expected;
  }
  stop |= 4 * expected > static_cast<float>(a.attend_end - a.attend_begin);
  stop = stop && !a.always_sample;
  for (int g = 0; stop && g < a.group; ++g) a.state[g].running = false;
  for (int g = 0; g < a.group; ++g) {
    running |= a.state[g].running;
    a.collect |= a.state[g].running && a.state[g].filter < a.state[g].covered;
  }
  for (int g = 0; a.collect && g < a.group; ++g) {
    if (a.state[g].running) a.state[g].covered = a.state[g].deep;
  }
  return running;
}

// Relative error of a float32 sum over the keys, and with that of the scores: _sums_rounding and
// _rounding of certjax/reference.py. `products` is ‖q‖ max ‖k‖.
inline double SumsRounding(const CertifiedHead& a) {
  return 0x1p-24 * 4 * (1024 + 64 + static_cast<double>(a.capacity) / 4096);
}
inline double Rounding(const CertifiedHead& a, double products) {
  const double eta = 0x1p-24 * ((a.head_dim + 4) * products + 96);
  return __builtin_expm1(2 * eta) + SumsRounding(a);
}

inline int64_t WindowKeys(const CertifiedHead& a) {
  return a.pool_begin - a.attend_begin + a.attend_end - a.pool_end;
}
inline int64_t FirstBlock(const CertifiedHead& a) { return a.pool_begin / kBlock; }
inline int64_t Blocks(const CertifiedHead& a) {
  return (a.pool_end + kBlock - 1) / kBlock - FirstBlock(a);
}
inline int64_t Chunks(const CertifiedHead& a) {
  return (Blocks(a) + kChunkBlocks - 1) / kChunkBlocks;
}

// One ISA level. Arrays are indexed by Storage.
struct Kernels {
  void (*dense_chunk[kStorages])(const DenseChunk&);
  void (*dense_merge[kStorages])(const DenseMerge&);
  void (*append_head[kStorages])(const AppendHead&);
  bool (*all_finite[kStorages])(const void*, int64_t count);
  void (*prepare[kStorages])(CertifiedHead&);
  void (*scan)(CertifiedHead&, int64_t chunk);
  void (*plan[kStorages])(CertifiedHead&, const float* start_level);
  void (*read[kStorages])(CertifiedHead&, int64_t chunk);
  void (*evaluate[kStorages])(CertifiedHead&, int head);
  void (*project[kStorages])(const ProjectTask&);
  void (*project_merge[kStorages])(const ProjectMerge&);
};

extern const Kernels kScalarKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvxVnniKernels;
extern const Kernels kAvx512Kernels;
#endif

}  // namespace certjax

#endif  // CERTJAX_KERNELS_TYPES_H_
