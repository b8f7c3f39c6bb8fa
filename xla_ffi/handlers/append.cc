// certjax_append: one token for every active row, in place.
#include <algorithm>
#include <memory>
#include <vector>

#include "handlers/check.h"
#include "handlers/handlers.h"
#include "handlers/parallel.h"

namespace certjax {
namespace {

namespace ffi = xla::ffi;

// The operands in their order; the first kAliased are results too, at the same address.
enum Operand : size_t {
  kKey,
  kValue,
  kCodes,
  kCodeScale,
  kCodeZero,
  kResidualRatio,
  kResidualNorm,
  kValueSize,
  kValueNorm,
  kScaleMax,
  kKeyNormMax,
  kLength,
  kValid,
  kAliased,
  kChannelWeight = kAliased,
  kChannelOrder,
  kValueCenter,
  kNewKey,
  kNewValue,
  kActive,
  kOperands
};

// Channels of a call below which the pool costs more than it gives, at about 2 ns for one channel
// of a token and 2 ns for one channel of each of the 64 keys of a block that is coded.
constexpr int64_t kSmall = 1 << 14;

// Where the operands lie. Tasks may hold this, never an AnyBuffer: that refers to the call's own
// descriptors, which another call of the same program reuses once this handler has returned.
struct Operands {
  std::vector<void*> data;

  template <typename T>
  T* At(Operand operand, int64_t offset) const {
    return static_cast<T*>(data[operand]) + offset;
  }
};

ffi::Future Append(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   int32_t storage, int32_t isa) {
  Checker check;
  check.Require(args.size() == kOperands && rets.size() == kAliased,
                "append takes 19 operands and gives 13 results");
  if (!check.ok()) return Failed(check.error());
  std::vector<ffi::AnyBuffer> buffers;
  Operands x;
  for (size_t i = 0; i < kOperands; ++i) {
    auto buffer = args.get<ffi::AnyBuffer>(i);
    if (!buffer) return Failed(buffer.error());
    buffers.push_back(*buffer);
    x.data.push_back(buffer->untyped_data());
  }
  check.Require(buffers[kKey].dimensions().size() >= 4, "key must have at least 4 axes");
  if (!check.ok()) return Failed(check.error());

  const Checker::Dims lead = LeadOf(buffers[kKey], 3);
  const auto* ksh = buffers[kKey].dimensions().end() - 3;
  const int64_t K = ksh[0], S = ksh[1], H = ksh[2], P = S / kBlock;
  const int64_t B = Product(lead);
  const ffi::DataType type = StorageType(storage);
  const Kernels* kernels = KernelsFor(isa);
  check.KernelsOf(kernels, isa);
  check.HeadDim(H);
  check.Require(S % kBlock == 0, "the capacity must be a multiple of 64: got " + std::to_string(S));
  check.Require(type != ffi::DataType::INVALID, "storage is unknown: " + std::to_string(storage));
  const auto field = [&](const char* name, Operand i, ffi::DataType dtype,
                         std::initializer_list<int64_t> rest) {
    check.Buffer(name, buffers[i], dtype, lead, rest);
  };
  using ffi::DataType;
  field("key", kKey, type, {K, S, H});
  field("value", kValue, type, {K, S, H});
  field("codes", kCodes, DataType::U8, {K, P, kBlock / kLanes, H / 8, 64});
  field("code_scale", kCodeScale, DataType::U8, {K, P, H});
  field("code_zero", kCodeZero, DataType::S8, {K, P, H});
  field("residual_ratio", kResidualRatio, DataType::F32, {K, P});
  field("residual_norm", kResidualNorm, DataType::U16, {K, S});
  field("value_size", kValueSize, DataType::U16, {K, S});
  field("value_norm", kValueNorm, DataType::U16, {K, S});
  field("scale_max", kScaleMax, DataType::U8, {K, H});
  field("key_norm_max", kKeyNormMax, DataType::F32, {K});
  field("length", kLength, DataType::S32, {});
  field("valid", kValid, DataType::PRED, {});
  field("channel_weight", kChannelWeight, DataType::F32, {K, H});
  field("channel_order", kChannelOrder, DataType::S32, {K, H});
  field("value_center", kValueCenter, DataType::F32, {K, H});
  field("new_key", kNewKey, type, {K, H});
  field("new_value", kNewValue, type, {K, H});
  field("active", kActive, DataType::PRED, {});
  for (size_t i = 0; i < kAliased; ++i) {
    auto result = rets.get<ffi::AnyBuffer>(i);
    if (!result) return Failed(result.error());
    check.Require(buffers[i].element_count() == 0 || (*result)->untyped_data() == x.data[i],
                  "a result does not share its operand's memory");
  }
  if (!check.ok()) return Failed(check.error());

  // What happens to a row is decided once for all its kv heads, before any of them is touched.
  std::vector<int64_t> rows;
  std::vector<int64_t> positions;
  const int64_t bytes = StorageBytes(storage);
  bool coding = false;
  for (int64_t b = 0; b < B; ++b) {
    bool& valid = *x.At<bool>(kValid, b);
    int32_t& length = *x.At<int32_t>(kLength, b);
    if (!*x.At<bool>(kActive, b) || !valid) continue;
    const auto finite = [&](Operand i) {
      return kernels->all_finite[storage](x.At<char>(i, b * K * H * bytes), K * H);
    };
    if (length < 0 || length >= S || !finite(kNewKey) || !finite(kNewValue)) {
      valid = false;
      continue;
    }
    rows.push_back(b);
    positions.push_back(length);
    ++length;
    coding |= length % kBlock == 0;
  }

  const auto run = [=](int64_t t) {
    const int64_t b = rows[t / K], bk = b * K + t % K;
    kernels->append_head[storage](
        {x.At<char>(kKey, bk * S * H * bytes), x.At<char>(kValue, bk * S * H * bytes),
         x.At<uint8_t>(kCodes, bk * S * H / 2), x.At<uint8_t>(kCodeScale, bk * P * H),
         x.At<int8_t>(kCodeZero, bk * P * H), x.At<float>(kResidualRatio, bk * P),
         x.At<uint16_t>(kResidualNorm, bk * S), x.At<uint16_t>(kValueSize, bk * S),
         x.At<uint16_t>(kValueNorm, bk * S), x.At<uint8_t>(kScaleMax, bk * H),
         x.At<float>(kKeyNormMax, bk), x.At<float>(kChannelWeight, bk * H),
         x.At<float>(kValueCenter, bk * H), x.At<int32_t>(kChannelOrder, bk * H),
         x.At<char>(kNewKey, bk * H * bytes), x.At<char>(kNewValue, bk * H * bytes),
         positions[t / K], static_cast<int>(H)});
  };
  const int64_t heads = static_cast<int64_t>(rows.size()) * K;
  const int64_t channels = heads * H * (coding ? kBlock : 1);
  const auto shared = std::make_shared<const decltype(run)>(run);
  return ParallelFor(pool, heads, channels < kSmall, [shared](int64_t t) { (*shared)(t); });
}

}  // namespace
}  // namespace certjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(certjax_append, certjax::Append,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int32_t>("storage")
                                  .Attr<int32_t>("isa"));
