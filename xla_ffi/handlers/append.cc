// certjax_append: one token for every active row, in place.
#include <algorithm>
#include <memory>
#include <vector>

#include "handlers/call.h"
#include "handlers/guard.h"
#include "handlers/handlers.h"
#include "handlers/parallel.h"

namespace certjax {
namespace {

namespace ffi = xla::ffi;

enum Operand : size_t { kNewKey = Field::kCount, kNewValue, kActive, kOperands };

// Channels of a call below which the pool costs more than it gives, at about 2 ns for one channel
// of a token and 2 ns for one channel of each of the 64 keys of a block that is coded.
constexpr int64_t kSmall = 1 << 14;

ffi::Future Append(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   int32_t storage, int32_t isa) {
  Call call("append", args, rets, kOperands, Field::kAliased);
  Checker& check = call.check;
  const CacheShape cache = CheckCache(&call, storage);
  const Kernels* kernels = KernelsFor(isa);
  check.KernelsOf(kernels, isa);
  if (!check.ok()) return Failed(check.error());
  const int64_t B = cache.B, K = cache.K, S = cache.S, H = cache.H, P = cache.P;
  const int64_t bytes = cache.bytes;
  check.Buffer("new_key", call.in[kNewKey], cache.type, cache.lead, {K, H});
  check.Buffer("new_value", call.in[kNewValue], cache.type, cache.lead, {K, H});
  check.Buffer("active", call.in[kActive], ffi::DataType::PRED, cache.lead, {});
  if (!check.ok()) return Failed(check.error());
  const Pointers& x = call.operands;
  for (size_t i = 0; i < Field::kAliased; ++i) {
    check.Require(call.in[i].element_count() == 0 || call.results.data[i] == x.data[i],
                  "a result does not share its operand's memory");
  }
  if (!check.ok()) return Failed(check.error());

  // What happens to a row is decided once for all its kv heads, before any of them is touched.
  std::vector<int64_t> rows;
  std::vector<int64_t> positions;
  bool coding = false;
  for (int64_t b = 0; b < B; ++b) {
    uint8_t& valid = *x.At<uint8_t>(Field::kValid, b);
    int32_t& length = *x.At<int32_t>(Field::kLength, b);
    if (!*x.At<uint8_t>(kActive, b) || !valid) continue;
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
        {x.At<char>(Field::kKey, bk * S * H * bytes), x.At<char>(Field::kValue, bk * S * H * bytes),
         x.At<uint8_t>(Field::kCodes, bk * S * H / 2), x.At<uint8_t>(Field::kCodeScale, bk * P * H),
         x.At<int8_t>(Field::kCodeZero, bk * P * H), x.At<float>(Field::kResidualRatio, bk * P),
         x.At<uint16_t>(Field::kResidualNorm, bk * S), x.At<uint16_t>(Field::kValueSize, bk * S),
         x.At<uint16_t>(Field::kValueNorm, bk * S), x.At<uint8_t>(Field::kScaleMax, bk * H),
         x.At<float>(Field::kKeyNormMax, bk), x.At<float>(Field::kChannelWeight, bk * H),
         x.At<float>(Field::kValueCenter, bk * H), x.At<int32_t>(Field::kChannelOrder, bk * H),
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(certjax_append, certjax::Guarded<certjax::Append>::Call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int32_t>("storage")
                                  .Attr<int32_t>("isa"));
