// certjax_scan: the upper bounds that a certified step starts from, as the kernels keep them. For
// tests and research: nothing in a step needs them outside the extension.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "handlers/arena.h"
#include "handlers/guard.h"
#include "handlers/handlers.h"
#include "handlers/parallel.h"
#include "handlers/step.h"

namespace certjax {
namespace {

namespace ffi = xla::ffi;

enum Output : size_t { kUpper, kReference, kOutputs };

// The part of a step's workspace that Prepare and Scan use.
void Carve(CertifiedHead& a, Layout* layout) {
  const int64_t G = a.group, H = a.head_dim;
  layout->Take(&a.ordered, G * H);
  layout->Take(&a.minus_step, G * H);
  layout->Take(&a.inverse_step, G * H);
  layout->Take(&a.lane_query, G * H);
  layout->Take(&a.window_score, G * WindowKeys(a));
  layout->Take(&a.chunk, Chunks(a));
  layout->Take(&a.upper, Blocks(a) * kBlock * G);
  layout->Take(&a.estimate, Chunks(a) * (kChunkBlocks + 3) * G * kLanes);
}

// The value of a float16.
float FromF16(uint16_t half) {
  const int exponent = half >> 10 & 31;
  const float fraction = static_cast<float>(half & 0x3FF);
  float x = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(fraction + 1024, exponent - 25);
  if (exponent == 31) {
    x = fraction == 0 ? std::numeric_limits<float>::infinity()
                      : std::numeric_limits<float>::quiet_NaN();
  }
  return half & 0x8000 ? -x : x;
}

// One kv head; upper is [G, S]. False where there is no memory.
bool ScanHead(CertifiedHead& a, const Kernels& kernels, int storage, float* upper,
              float* reference) {
  Layout count(nullptr);
  Carve(a, &count);
  Arena arena;
  if (!arena.Reserve(count.bytes())) return false;
  Layout deal(arena.data());
  Carve(a, &deal);
  kernels.prepare[storage](a);
  for (int64_t chunk = 0; chunk < Chunks(a); ++chunk) kernels.scan(a, chunk);
  const int64_t first = FirstBlock(a) * kBlock;
  for (int64_t i = 0; i < Blocks(a) * kBlock * a.group; ++i) {
    const int64_t tile = i / (kLanes * a.group), g = i / kLanes % a.group;
    upper[g * a.capacity + first + tile * kLanes + i % kLanes] = FromF16(a.upper[i]);
  }
  std::copy_n(a.reference, a.group, reference);
  return true;
}

ffi::Error Scan(ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t window, int64_t sinks,
                int64_t span, int32_t storage, int32_t isa) {
  Step step(Call("scan", args, rets, Step::kOperands, kOutputs), window, sinks, span, storage, isa);
  Checker& check = step.call.check;
  if (!check.ok()) return check.error();
  const CacheShape& cache = step.cache;
  const int64_t B = cache.B, K = cache.K, S = cache.S, G = step.G;
  check.Buffer("upper", step.call.out[kUpper], ffi::DataType::F32, cache.lead, {K, G, S});
  check.Buffer("reference", step.call.out[kReference], ffi::DataType::F32, cache.lead, {K, G});
  if (!check.ok()) return check.error();

  ScopedFloatState float_state;
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (int64_t bk = 0; bk < B * K; ++bk) {
    CertifiedHead a = step.Head(bk);
    float* upper = step.call.results.At<float>(kUpper, bk * G * S);
    float* reference = step.call.results.At<float>(kReference, bk * G);
    const bool usable = step.Usable(bk / K);
    std::fill_n(upper, G * S, usable ? -std::numeric_limits<float>::infinity() : kNan);
    std::fill_n(reference, G, usable ? 0.0f : kNan);
    if (!usable || a.pool_begin == a.pool_end) continue;
    if (!ScanHead(a, *step.kernels, storage, upper, reference)) {
      return NoMemory();
    }
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace certjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(certjax_scan, certjax::Guarded<certjax::Scan>::Call,
                              xla::ffi::Ffi::Bind()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("sinks")
                                  .Attr<int64_t>("span")
                                  .Attr<int32_t>("storage")
                                  .Attr<int32_t>("isa"));
