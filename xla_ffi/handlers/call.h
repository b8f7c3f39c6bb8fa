// The buffers of a call, and the cache that most handlers take first.
#ifndef CERTJAX_HANDLERS_CALL_H_
#define CERTJAX_HANDLERS_CALL_H_

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "handlers/check.h"

namespace certjax {

// The arrays of a cache (certjax/types.py) in the order of the operands. Append has those before
// kAliased as results too, at the same address.
struct Field {
  enum : size_t {
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
    kCount
  };
};

// Where buffers lie. Tasks may hold this, never an AnyBuffer: that refers to the call's own
// descriptors, which another call of the same program reuses once the handler has returned.
struct Pointers {
  std::vector<void*> data;

  template <typename T>
  T* At(size_t i, int64_t offset) const {
    return static_cast<T*>(data[i]) + offset;
  }
};

// The operands and results of a handler that takes any number of them.
struct Call {
  Checker check;
  std::vector<xla::ffi::AnyBuffer> in, out;
  Pointers operands, results;

  Call(const char* name, const xla::ffi::RemainingArgs& args, const xla::ffi::RemainingRets& rets,
       size_t takes, size_t gives) {
    check.Require(args.size() == takes && rets.size() == gives,
                  std::string(name) + " takes " + std::to_string(takes) + " operands and gives " +
                      std::to_string(gives) + " results");
    for (size_t i = 0; check.ok() && i < takes; ++i) {
      auto buffer = args.get<xla::ffi::AnyBuffer>(i);
      check.Require(buffer.has_value(), "an operand is not a buffer");
      if (check.ok()) Keep(*buffer, &in, &operands);
    }
    for (size_t i = 0; check.ok() && i < gives; ++i) {
      auto buffer = rets.get<xla::ffi::AnyBuffer>(i);
      check.Require(buffer.has_value(), "a result is not a buffer");
      if (check.ok()) Keep(**buffer, &out, &results);
    }
  }

 private:
  static void Keep(xla::ffi::AnyBuffer buffer, std::vector<xla::ffi::AnyBuffer>* buffers,
                   Pointers* pointers) {
    pointers->data.push_back(buffer.untyped_data());
    buffers->push_back(buffer);
  }
};

// Sizes of a cache: batch rows (all leading axes), kv heads, capacity, head dim, blocks; bytes of
// an element of key and value.
struct CacheShape {
  Checker::Dims lead;
  int64_t B = 0, K = 0, S = 0, H = 0, P = 0, bytes = 0;
  xla::ffi::DataType type = xla::ffi::DataType::INVALID;
};

// Checks that the first operands are a cache.
inline CacheShape CheckCache(Call* call, int32_t storage) {
  using xla::ffi::DataType;
  Checker& check = call->check;
  CacheShape c;
  if (!check.ok()) return c;
  const xla::ffi::AnyBuffer& key = call->in[Field::kKey];
  check.Require(key.dimensions().size() >= 4, "key must have at least 4 axes");
  if (!check.ok()) return c;
  c.lead = LeadOf(key, 3);
  c.B = Product(c.lead);
  c.K = key.dimensions().end()[-3];
  c.S = key.dimensions().end()[-2];
  c.H = key.dimensions().end()[-1];
  c.P = c.S / kBlock;
  c.bytes = StorageBytes(storage);
  c.type = StorageType(storage);
  const int64_t K = c.K, S = c.S, H = c.H, P = c.P;
  check.HeadDim(H);
  check.Require(S % kBlock == 0, "the capacity must be a multiple of 64: got " + std::to_string(S));
  check.Require(c.type != DataType::INVALID, "storage is unknown: " + std::to_string(storage));
  const auto field = [&](const char* name, size_t i, DataType type,
                         std::initializer_list<int64_t> rest) {
    check.Buffer(name, call->in[i], type, c.lead, rest);
  };
  field("key", Field::kKey, c.type, {K, S, H});
  field("value", Field::kValue, c.type, {K, S, H});
  field("codes", Field::kCodes, DataType::U8, {K, P, kBlock / kLanes, H / 8, 4 * kLanes});
  field("code_scale", Field::kCodeScale, DataType::U8, {K, P, H});
  field("code_zero", Field::kCodeZero, DataType::S8, {K, P, H});
  field("residual_ratio", Field::kResidualRatio, DataType::F32, {K, P});
  field("residual_norm", Field::kResidualNorm, DataType::U16, {K, S});
  field("value_size", Field::kValueSize, DataType::U16, {K, S});
  field("value_norm", Field::kValueNorm, DataType::U16, {K, S});
  field("scale_max", Field::kScaleMax, DataType::U8, {K, H});
  field("key_norm_max", Field::kKeyNormMax, DataType::F32, {K});
  field("length", Field::kLength, DataType::S32, {});
  field("valid", Field::kValid, DataType::PRED, {});
  field("channel_weight", Field::kChannelWeight, DataType::F32, {K, H});
  field("channel_order", Field::kChannelOrder, DataType::S32, {K, H});
  field("value_center", Field::kValueCenter, DataType::F32, {K, H});
  return c;
}

}  // namespace certjax

#endif  // CERTJAX_HANDLERS_CALL_H_
