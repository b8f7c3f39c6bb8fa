// certjax_certified_decode: one certified step for all kv heads of all rows.
#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "handlers/certified_head.h"
#include "handlers/crew.h"
#include "handlers/guard.h"
#include "handlers/handlers.h"
#include "handlers/pages.h"
#include "handlers/step.h"

namespace certjax {
namespace {

namespace ffi = xla::ffi;

// In the order of the operands, behind those of every step, and of the results.
enum Operand : size_t { kEpsilon = Step::kOperands, kDelta, kHint, kWaiting, kOperands };
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
  Step step(Call("certified_decode", args, rets, kOperands, kOutputs), window, sinks, span, storage,
            isa);
  Checker& check = step.call.check;
  check.Require(measure == kValue || measure == kOutput || measure == kDenominator,
                "measure is unknown: " + std::to_string(measure));
  if (!check.ok()) return Failed(check.error());
  using ffi::DataType;
  const CacheShape& cache = step.cache;
  const int64_t B = cache.B, K = cache.K, H = cache.H, G = step.G;
  const auto operand = [&](const char* name, Operand i, DataType t,
                           std::initializer_list<int64_t> rest) {
    check.Buffer(name, step.call.in[i], t, cache.lead, rest);
  };
  operand("epsilon", kEpsilon, DataType::F32, {});
  operand("delta", kDelta, DataType::F32, {});
  operand("hint.level", kHint, DataType::F32, {K, G});
  operand("hint.wait", kWaiting, DataType::S32, {K, G});
  const auto result = [&](const char* name, Output i, DataType t) {
    check.Buffer(name, step.call.out[i], t, cache.lead, {K, G});
  };
  check.Buffer("out", step.call.out[kOut], DataType::F32, cache.lead, {K, G, H});
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

  for (size_t i : {Field::kKey, Field::kValue, Field::kCodes}) {
    RequestHugePages(step.call.operands.data[i], step.call.in[i].size_bytes());
  }
  const Pointers &in = step.call.operands, &out = step.call.results;
  Job job;
  std::vector<Task> tasks;
  int64_t keys = 0;
  for (int64_t bk = 0; bk < B * K; ++bk) {
    const int64_t b = bk / K;
    auto head = std::make_unique<HeadRun>();
    CertifiedHead& a = head->a;
    a = step.Head(bk);
    a.promise = {*in.At<float>(kEpsilon, b), *in.At<float>(kDelta, b),
                 static_cast<Measure>(measure), full && measure != kDenominator};
    head->usable = step.Usable(b);
    if (head->usable) {
      const int32_t* wait = in.At<int32_t>(kWaiting, bk * G);
      head->waiting = std::max(*std::max_element(wait, wait + G), 0);
      const int levels = LevelCount(a.pool_end - a.pool_begin, a.promise.epsilon);
      if (always_sample) head->waiting = 0;
      a.always_sample = always_sample;
      a.levels = dense || head->waiting > 0 ? 0 : levels;
      keys += a.attend_end - a.attend_begin;
    }
    head->results = {out.At<float>(kOut, bk * G * H),
                     out.At<bool>(kCertified, bk * G),
                     out.At<bool>(kExact, bk * G),
                     out.At<float>(kErrorBound, bk * G),
                     out.At<int32_t>(kLevel, bk * G),
                     out.At<float>(kThreshold, bk * G),
                     out.At<int32_t>(kKeysRead, bk * G),
                     out.At<int32_t>(kCandidates, bk * G),
                     out.At<float>(kBytesRead, bk * G),
                     out.At<float>(kLogNormalizer, bk * G),
                     out.At<float>(kValueScaleLower, bk * G),
                     out.At<float>(kSufficient, bk * G),
                     out.At<int32_t>(kWait, bk * G)};
    head->hint = in.At<float>(kHint, bk * G);
    head->kernels = step.kernels;
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(certjax_certified_decode,
                              certjax::Guarded<certjax::CertifiedDecode>::Call,
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
