// certjax_scan: the upper bounds that a certified step starts from, as the kernels keep them. For
// tests and research: nothing in a step needs them outside the extension.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "handlers/arena.h"
#include "handlers/check.h"
#include "handlers/handlers.h"
#include "handlers/parallel.h"

namespace certjax {
namespace {

namespace ffi = xla::ffi;

// In the order of the operands.
enum Operand : size_t {
  kQuery,
  kKey,
  kCodes,
  kCodeScale,
  kCodeZero,
  kResidualRatio,
  kResidualNorm,
  kValueSize,
  kValueNorm,
  kScaleMax,
  kChannelWeight,
  kChannelOrder,
  kValueCenter,
  kLength,
  kValid,
  kWords,
  kOperands
};
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
  Checker check;
  check.Require(args.size() == kOperands && rets.size() == kOutputs,
                "scan takes 16 operands and gives 2 results");
  if (!check.ok()) return check.error();
  std::vector<ffi::AnyBuffer> in, out;
  for (size_t i = 0; i < kOperands; ++i) {
    auto buffer = args.get<ffi::AnyBuffer>(i);
    if (!buffer) return buffer.error();
    in.push_back(*buffer);
  }
  for (size_t i = 0; i < kOutputs; ++i) {
    auto buffer = rets.get<ffi::AnyBuffer>(i);
    if (!buffer) return buffer.error();
    out.push_back(**buffer);
  }
  check.Require(in[kQuery].dimensions().size() >= 4, "query must have at least 4 axes");
  check.Require(in[kKey].dimensions().size() >= 4, "key must have at least 4 axes");
  if (!check.ok()) return check.error();
  using ffi::DataType;
  const Checker::Dims lead = LeadOf(in[kQuery], 3);
  const auto* kgh = in[kQuery].dimensions().end() - 3;
  const int64_t K = kgh[0], G = kgh[1], H = kgh[2];
  const int64_t S = in[kKey].dimensions().end()[-2], P = S / kBlock;
  const int64_t B = Product(lead);
  const DataType type = StorageType(storage);
  const Kernels* kernels = KernelsFor(isa);
  check.KernelsOf(kernels, isa);
  check.HeadDim(H);
  check.Require(S % kBlock == 0, "the capacity must be a multiple of 64: got " + std::to_string(S));
  check.Require(G >= 1 && G <= kMaxGroup,
                "query heads per kv head must be 1 to 16: got " + std::to_string(G));
  check.Require(window >= 0 && sinks >= 0 && span >= 0,
                "window, sinks and span must be at least 0");
  check.Require(type != DataType::INVALID, "storage is unknown: " + std::to_string(storage));
  const auto operand = [&](const char* name, Operand i, DataType t,
                           std::initializer_list<int64_t> rest) {
    check.Buffer(name, in[i], t, lead, rest);
  };
  operand("query", kQuery, DataType::F32, {K, G, H});
  operand("key", kKey, type, {K, S, H});
  operand("codes", kCodes, DataType::U8, {K, P, kBlock / kLanes, H / 8, 4 * kLanes});
  operand("code_scale", kCodeScale, DataType::U8, {K, P, H});
  operand("code_zero", kCodeZero, DataType::S8, {K, P, H});
  operand("residual_ratio", kResidualRatio, DataType::F32, {K, P});
  operand("residual_norm", kResidualNorm, DataType::U16, {K, S});
  operand("value_size", kValueSize, DataType::U16, {K, S});
  operand("value_norm", kValueNorm, DataType::U16, {K, S});
  operand("scale_max", kScaleMax, DataType::U8, {K, H});
  operand("channel_weight", kChannelWeight, DataType::F32, {K, H});
  operand("channel_order", kChannelOrder, DataType::S32, {K, H});
  operand("value_center", kValueCenter, DataType::F32, {K, H});
  operand("length", kLength, DataType::S32, {});
  operand("valid", kValid, DataType::PRED, {});
  operand("words", kWords, DataType::U32, {K, 4});
  check.Buffer("upper", out[kUpper], DataType::F32, lead, {K, G, S});
  check.Buffer("reference", out[kReference], DataType::F32, lead, {K, G});
  if (!check.ok()) return check.error();

  ScopedFloatState float_state;
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const auto at = [&](Operand i, int64_t offset) {
    return static_cast<const char*>(in[i].untyped_data()) + offset;
  };
  const auto f32 = [&](Operand i, int64_t offset) {
    return reinterpret_cast<const float*>(at(i, 4 * offset));
  };
  const auto u16 = [&](Operand i, int64_t offset) {
    return reinterpret_cast<const uint16_t*>(at(i, 2 * offset));
  };
  const auto u8 = [&](Operand i, int64_t offset) {
    return reinterpret_cast<const uint8_t*>(at(i, offset));
  };
  for (int64_t bk = 0; bk < B * K; ++bk) {
    const int64_t b = bk / K;
    CertifiedHead a = {};
    a.key = at(kKey, bk * S * H * StorageBytes(storage));
    a.codes = u8(kCodes, bk * S * H / 2);
    a.code_scale = u8(kCodeScale, bk * P * H);
    a.code_zero = reinterpret_cast<const int8_t*>(u8(kCodeZero, bk * P * H));
    a.residual_ratio = f32(kResidualRatio, bk * P);
    a.residual_norm = u16(kResidualNorm, bk * S);
    a.value_size = u16(kValueSize, bk * S);
    a.value_norm = u16(kValueNorm, bk * S);
    a.scale_max = u8(kScaleMax, bk * H);
    a.channel_weight = f32(kChannelWeight, bk * H);
    a.channel_order = reinterpret_cast<const int32_t*>(at(kChannelOrder, 4 * bk * H));
    a.value_center = f32(kValueCenter, bk * H);
    a.query = f32(kQuery, bk * G * H);
    a.group = static_cast<int>(G);
    a.head_dim = static_cast<int>(H);
    a.capacity = S;
    std::copy_n(reinterpret_cast<const uint32_t*>(at(kWords, 16 * bk)), 4, a.words);
    const int64_t length = *reinterpret_cast<const int32_t*>(at(kLength, 4 * b));
    // masks() of reference.py
    a.attend_end = length;
    a.attend_begin = span > 0 ? std::max<int64_t>(length - span, 0) : 0;
    a.pool_begin = std::max(a.attend_begin, std::min(sinks, length));
    a.pool_end = std::max(a.pool_begin, std::min(length - window, length / kBlock * kBlock));
    float* upper = static_cast<float*>(out[kUpper].untyped_data()) + bk * G * S;
    float* reference = static_cast<float*>(out[kReference].untyped_data()) + bk * G;
    const bool usable = *reinterpret_cast<const bool*>(at(kValid, b)) && length >= 0 &&
                        length <= S &&
                        kernels->all_finite[kFloat32](f32(kQuery, b * K * G * H), K * G * H);
    std::fill_n(upper, G * S, usable ? -std::numeric_limits<float>::infinity() : kNan);
    std::fill_n(reference, G, usable ? 0.0f : kNan);
    if (!usable || a.pool_begin == a.pool_end) continue;
    if (!ScanHead(a, *kernels, storage, upper, reference)) {
      return ffi::Error(ffi::ErrorCode::kResourceExhausted, "no memory for a scan");
    }
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace certjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(certjax_scan, certjax::Scan,
                              xla::ffi::Ffi::Bind()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("sinks")
                                  .Attr<int64_t>("span")
                                  .Attr<int32_t>("storage")
                                  .Attr<int32_t>("isa"));
