// certjax_certified_decode: one certified step for all kv heads of all rows.
#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "handlers/certified_head.h"
#include "handlers/check.h"
#include "handlers/crew.h"
#include "handlers/handlers.h"
#include "handlers/pages.h"

namespace certjax {
namespace {

namespace ffi = xla::ffi;

// In the order of the operands and results.
enum Operand : size_t {
  kQuery,
  kKey,
  kValueRows,
  kCodes,
  kCodeScale,
  kCodeZero,
  kResidualRatio,
  kResidualNorm,
  kValueSize,
  kValueNorm,
  kScaleMax,
  kKeyNormMax,
  kChannelWeight,
  kChannelOrder,
  kValueCenter,
  kLength,
  kValid,
  kWords,
  kEpsilon,
  kDelta,
  kHint,
  kWaiting,
  kOperands
};
enum Output : size_t {
  kOut,
  kCertified,
  kExact,
  kErrorBound,
  kLevel,
  kThreshold,
  kKeysRead,
  kCandidates,
  kBytesRead,
  kLogNormalizer,
  kValueScaleLower,
  kSufficient,
  kWait,
  kOutputs
};

// Below this many keys times channels over all heads the pool costs more than it gives.
constexpr int64_t kSmall = 1 << 18;

struct Job {
  std::vector<std::unique_ptr<HeadRun>> heads;

  void Run(const Task& task, std::vector<Task>* more) { heads[task.head]->Run(task, more); }
  bool failed() const {
    return std::any_of(heads.begin(), heads.end(), [](const auto& h) { return h->failed; });
  }
};

// Levels of the grid below half of the pool: level_count of estimator.py.
int LevelCount(int64_t pool_keys, float epsilon) {
  const float first = std::max(16.0f, 0.3f / (epsilon * epsilon));
  const float ratio = static_cast<float>(pool_keys) / 2 / first;
  return ratio > 1.0f ? static_cast<int>(std::ceil(2 * std::log2(ratio))) : 0;
}

ffi::Future CertifiedDecode(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                            int32_t measure, bool full, bool dense, bool always_sample,
                            float largest, int64_t window, int64_t sinks, int64_t span,
                            int32_t storage, int32_t isa) {
  Checker check;
  check.Require(args.size() == kOperands && rets.size() == kOutputs,
                "certified_decode takes 22 operands and gives 13 results");
  if (!check.ok()) return Failed(check.error());
  std::vector<ffi::AnyBuffer> in, out;
  for (size_t i = 0; i < kOperands; ++i) {
    auto buffer = args.get<ffi::AnyBuffer>(i);
    if (!buffer) return Failed(buffer.error());
    in.push_back(*buffer);
  }
  for (size_t i = 0; i < kOutputs; ++i) {
    auto buffer = rets.get<ffi::AnyBuffer>(i);
    if (!buffer) return Failed(buffer.error());
    out.push_back(**buffer);
  }
  check.Require(in[kQuery].dimensions().size() >= 4, "query must have at least 4 axes");
  check.Require(in[kKey].dimensions().size() >= 4, "key must have at least 4 axes");
  if (!check.ok()) return Failed(check.error());
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
  check.Require(measure == kValue || measure == kOutput || measure == kDenominator,
                "measure is unknown: " + std::to_string(measure));
  check.Require(window >= 0 && sinks >= 0 && span >= 0,
                "window, sinks and span must be at least 0");
  check.Require(type != DataType::INVALID, "storage is unknown: " + std::to_string(storage));
  if (!check.ok()) return Failed(check.error());
  const auto operand = [&](const char* name, Operand i, DataType t,
                           std::initializer_list<int64_t> rest) {
    check.Buffer(name, in[i], t, lead, rest);
  };
  operand("query", kQuery, DataType::F32, {K, G, H});
  operand("key", kKey, type, {K, S, H});
  operand("value", kValueRows, type, {K, S, H});
  operand("codes", kCodes, DataType::U8, {K, P, kBlock / kLanes, H / 8, 4 * kLanes});
  operand("code_scale", kCodeScale, DataType::U8, {K, P, H});
  operand("code_zero", kCodeZero, DataType::S8, {K, P, H});
  operand("residual_ratio", kResidualRatio, DataType::F32, {K, P});
  operand("residual_norm", kResidualNorm, DataType::U16, {K, S});
  operand("value_size", kValueSize, DataType::U16, {K, S});
  operand("value_norm", kValueNorm, DataType::U16, {K, S});
  operand("scale_max", kScaleMax, DataType::U8, {K, H});
  operand("key_norm_max", kKeyNormMax, DataType::F32, {K});
  operand("channel_weight", kChannelWeight, DataType::F32, {K, H});
  operand("channel_order", kChannelOrder, DataType::S32, {K, H});
  operand("value_center", kValueCenter, DataType::F32, {K, H});
  operand("length", kLength, DataType::S32, {});
  operand("valid", kValid, DataType::PRED, {});
  operand("words", kWords, DataType::U32, {K, 4});
  operand("epsilon", kEpsilon, DataType::F32, {});
  operand("delta", kDelta, DataType::F32, {});
  operand("hint.level", kHint, DataType::F32, {K, G});
  operand("hint.wait", kWaiting, DataType::S32, {K, G});
  const auto result = [&](const char* name, Output i, DataType t) {
    check.Buffer(name, out[i], t, lead, {K, G});
  };
  check.Buffer("out", out[kOut], DataType::F32, lead, {K, G, H});
  result("certified", kCertified, DataType::PRED);
  result("exact", kExact, DataType::PRED);
  result("error_bound", kErrorBound, DataType::F32);
  result("level", kLevel, DataType::S32);
  result("threshold", kThreshold, DataType::F32);
  result("keys_read", kKeysRead, DataType::S32);
  result("candidates", kCandidates, DataType::S32);
  result("bytes_read", kBytesRead, DataType::F32);
  result("log_normalizer", kLogNormalizer, DataType::F32);
  result("value_scale_lower", kValueScaleLower, DataType::F32);
  result("sufficient", kSufficient, DataType::F32);
  result("wait", kWait, DataType::S32);
  if (!check.ok()) return Failed(check.error());

  RequestHugePages(in[kKey].untyped_data(), in[kKey].size_bytes());
  RequestHugePages(in[kValueRows].untyped_data(), in[kValueRows].size_bytes());
  RequestHugePages(in[kCodes].untyped_data(), in[kCodes].size_bytes());
  Job job;
  std::vector<Task> tasks;
  int64_t keys = 0;
  const int64_t bytes = StorageBytes(storage);
  for (int64_t bk = 0; bk < B * K; ++bk) {
    const int64_t b = bk / K;
    const auto at = [&](Operand i, int64_t offset) {
      return static_cast<const char*>(in[i].untyped_data()) + offset;
    };
    const auto f32 = [&](Operand i, int64_t offset) {
      return reinterpret_cast<const float*>(at(i, 4 * offset));
    };
    const auto u16 = [&](Operand i) {
      return reinterpret_cast<const uint16_t*>(at(i, 2 * bk * S));
    };
    const auto u8 = [&](Operand i, int64_t offset) {
      return reinterpret_cast<const uint8_t*>(at(i, offset));
    };
    auto head = std::make_unique<HeadRun>();
    CertifiedHead& a = head->a;
    a.key = at(kKey, bk * S * H * bytes);
    a.value = at(kValueRows, bk * S * H * bytes);
    a.codes = u8(kCodes, bk * S * H / 2);
    a.code_scale = u8(kCodeScale, bk * P * H);
    a.code_zero = reinterpret_cast<const int8_t*>(u8(kCodeZero, bk * P * H));
    a.residual_ratio = f32(kResidualRatio, bk * P);
    a.residual_norm = u16(kResidualNorm);
    a.value_size = u16(kValueSize);
    a.value_norm = u16(kValueNorm);
    a.scale_max = u8(kScaleMax, bk * H);
    a.key_norm_max = *f32(kKeyNormMax, bk);
    a.channel_weight = f32(kChannelWeight, bk * H);
    a.channel_order = reinterpret_cast<const int32_t*>(at(kChannelOrder, 4 * bk * H));
    a.value_center = f32(kValueCenter, bk * H);
    a.query = f32(kQuery, bk * G * H);
    a.group = static_cast<int>(G);
    a.head_dim = static_cast<int>(H);
    a.capacity = S;
    std::copy_n(reinterpret_cast<const uint32_t*>(at(kWords, 16 * bk)), 4, a.words);
    a.promise = {*f32(kEpsilon, b), *f32(kDelta, b), static_cast<Measure>(measure),
                 full && measure != kDenominator};
    const int64_t length = *reinterpret_cast<const int32_t*>(at(kLength, 4 * b));
    // masks() of reference.py
    a.attend_end = length;
    a.attend_begin = span > 0 ? std::max<int64_t>(length - span, 0) : 0;
    a.pool_begin = std::max(a.attend_begin, std::min(sinks, length));
    a.pool_end = std::max(a.pool_begin, std::min(length - window, length / kBlock * kBlock));
    head->usable = *reinterpret_cast<const bool*>(at(kValid, b)) && length >= 0 && length <= S &&
                   kernels->all_finite[kFloat32](f32(kQuery, b * K * G * H), K * G * H);
    if (head->usable) {
      const auto* wait = reinterpret_cast<const int32_t*>(at(kWaiting, 4 * bk * G));
      head->waiting = std::max(*std::max_element(wait, wait + G), 0);
      const int levels = LevelCount(a.pool_end - a.pool_begin, a.promise.epsilon);
      if (always_sample) head->waiting = 0;
      a.always_sample = always_sample;
      a.levels = dense || head->waiting > 0 ? 0 : levels;
      keys += a.attend_end - a.attend_begin;
    }
    const auto field = [&](Output i) { return static_cast<char*>(out[i].untyped_data()); };
    const auto result_f32 = [&](Output i) { return reinterpret_cast<float*>(field(i)) + bk * G; };
    const auto result_s32 = [&](Output i) { return reinterpret_cast<int32_t*>(field(i)) + bk * G; };
    const auto result_bool = [&](Output i) { return reinterpret_cast<bool*>(field(i)) + bk * G; };
    head->results = {reinterpret_cast<float*>(field(kOut)) + bk * G * H,
                     result_bool(kCertified),
                     result_bool(kExact),
                     result_f32(kErrorBound),
                     result_s32(kLevel),
                     result_f32(kThreshold),
                     result_s32(kKeysRead),
                     result_s32(kCandidates),
                     result_f32(kBytesRead),
                     result_f32(kLogNormalizer),
                     result_f32(kValueScaleLower),
                     result_f32(kSufficient),
                     result_s32(kWait)};
    head->hint = f32(kHint, bk * G);
    head->kernels = kernels;
    head->largest = largest;
    head->storage = storage;
    head->number = bk;
    job.heads.push_back(std::move(head));
    tasks.push_back({B * K - 1 - bk, Task::kBegin, 0});  // a stack: head 0 comes first
  }
  const int64_t threads = pool.num_threads();
  SeenThreads().store(threads, std::memory_order_relaxed);
  const int64_t helpers = keys * H < kSmall ? 0 : std::max<int64_t>(threads - 1, 0);
  auto crew = std::make_shared<Crew<Job, Task>>(std::move(job), std::move(tasks));
  return crew->Start(pool, helpers);
}

}  // namespace
}  // namespace certjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(certjax_certified_decode, certjax::CertifiedDecode,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int32_t>("measure")
                                  .Attr<bool>("full")
                                  .Attr<bool>("dense")
                                  .Attr<bool>("always_sample")
                                  .Attr<float>("largest")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("sinks")
                                  .Attr<int64_t>("span")
                                  .Attr<int32_t>("storage")
                                  .Attr<int32_t>("isa"));
