// What a certified step and its scan take alike: a cache, queries, random words, what to attend to.
#ifndef CERTJAX_HANDLERS_STEP_H_
#define CERTJAX_HANDLERS_STEP_H_

#include <algorithm>
#include <cstdint>
#include <string>

#include "handlers/call.h"

namespace certjax {

struct Step {
  enum Operand : size_t { kQuery = Field::kCount, kWords, kOperands };

  Call call;
  CacheShape cache;
  int64_t G = 0, window, sinks, span;
  const Kernels* kernels;

  // Checks everything that both take; the caller checks the rest.
  Step(Call from, int64_t window, int64_t sinks, int64_t span, int32_t storage, int32_t isa)
      : call(std::move(from)), window(window), sinks(sinks), span(span), kernels(KernelsFor(isa)) {
    Checker& check = call.check;
    cache = CheckCache(&call, storage);
    check.KernelsOf(kernels, isa);
    check.Require(window >= 0 && sinks >= 0 && span >= 0,
                  "window, sinks and span must be at least 0");
    if (!check.ok()) return;
    this->window = std::min(window, cache.S);  // a length less the largest number would overflow
    this->span = std::min(span, cache.S);
    const Checker::Dims query = call.in[kQuery].dimensions();
    check.Require(query.size() >= 4, "query must have at least 4 axes");
    if (!check.ok()) return;
    G = query.end()[-2];
    check.Require(G >= 1 && G <= kMaxGroup,
                  "query heads per kv head must be 1 to 16: got " + std::to_string(G));
    check.Buffer("query", call.in[kQuery], xla::ffi::DataType::F32, cache.lead,
                 {cache.K, G, cache.H});
    check.Buffer("words", call.in[kWords], xla::ffi::DataType::U32, cache.lead, {cache.K, 4});
  }

  int64_t Length(int64_t b) const { return *call.operands.At<int32_t>(Field::kLength, b); }

  // Whether row b can be computed: a cache that is valid, a length that is possible, finite
  // queries.
  bool Usable(int64_t b) const {
    const int64_t heads = cache.K * G * cache.H;
    return *call.operands.At<uint8_t>(Field::kValid, b) && Length(b) >= 0 && Length(b) <= cache.S &&
           kernels->all_finite[kFloat32](call.operands.At<float>(kQuery, b * heads), heads);
  }

  // Kv head bk, counted over all rows: pointers, sizes, and the pool of masks() in reference.py.
  CertifiedHead Head(int64_t bk) const {
    const int64_t K = cache.K, S = cache.S, H = cache.H, P = cache.P;
    const int64_t bytes = cache.bytes;
    const Pointers& x = call.operands;
    CertifiedHead a = {};
    a.key = x.At<char>(Field::kKey, bk * S * H * bytes);
    a.value = x.At<char>(Field::kValue, bk * S * H * bytes);
    a.codes = x.At<uint8_t>(Field::kCodes, bk * S * H / 2);
    a.code_scale = x.At<uint8_t>(Field::kCodeScale, bk * P * H);
    a.code_zero = x.At<int8_t>(Field::kCodeZero, bk * P * H);
    a.residual_ratio = x.At<float>(Field::kResidualRatio, bk * P);
    a.residual_norm = x.At<uint16_t>(Field::kResidualNorm, bk * S);
    a.value_size = x.At<uint16_t>(Field::kValueSize, bk * S);
    a.value_norm = x.At<uint16_t>(Field::kValueNorm, bk * S);
    a.scale_max = x.At<uint8_t>(Field::kScaleMax, bk * H);
    a.key_norm_max = *x.At<float>(Field::kKeyNormMax, bk);
    a.channel_weight = x.At<float>(Field::kChannelWeight, bk * H);
    a.channel_order = x.At<int32_t>(Field::kChannelOrder, bk * H);
    a.value_center = x.At<float>(Field::kValueCenter, bk * H);
    a.query = x.At<float>(kQuery, bk * G * H);
    a.group = static_cast<int>(G);
    a.head_dim = static_cast<int>(H);
    a.capacity = S;
    std::copy_n(x.At<uint32_t>(kWords, 4 * bk), 4, a.words);
    const int64_t length = Length(bk / K);
    a.attend_end = length;
    a.attend_begin = span > 0 ? std::max<int64_t>(length - span, 0) : 0;
    a.pool_begin = std::max(a.attend_begin, std::min(sinks, length));
    a.pool_end = std::max(a.pool_begin, std::min(length - window, length / kBlock * kBlock));
    return a;
  }
};

}  // namespace certjax

#endif  // CERTJAX_HANDLERS_STEP_H_
