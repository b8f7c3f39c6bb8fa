// certjax_dense_decode: exact attention of one decode step over the newest `span` keys of each row.
#include <algorithm>
#include <atomic>
#include <limits>
#include <memory>
#include <vector>

#include "handlers/check.h"
#include "handlers/guard.h"
#include "handlers/handlers.h"
#include "handlers/parallel.h"

namespace certjax {
namespace {

namespace ffi = xla::ffi;

// Below this many multiply-adds (some 30 µs) the pool costs more than it gives.
constexpr int64_t kSmall = 1 << 19;

// Everything that the tasks of a call share. The last task of a kv head merges its partial results.
struct Job {
  const Kernels* kernels;
  int storage;
  int64_t group, head_dim;
  std::vector<DenseChunk> chunks;                   // of all kv heads
  std::vector<DenseMerge> merges;                   // one for each kv head that has chunks
  std::vector<int64_t> merge_of;                    // chunk → merge
  std::unique_ptr<std::atomic<int64_t>[]> pending;  // chunks of each merge not yet done
  std::unique_ptr<float[]> acc, state;

  void Run(int64_t t) {
    kernels->dense_chunk[storage](chunks[t]);
    const int64_t m = merge_of[t];
    if (pending[m].fetch_sub(1, std::memory_order_acq_rel) == 1) {
      kernels->dense_merge[storage](merges[m]);
    }
  }
};

ffi::Future DenseDecode(ffi::ThreadPool pool, ffi::AnyBuffer query, ffi::AnyBuffer key,
                        ffi::AnyBuffer value, ffi::AnyBuffer length, ffi::AnyBuffer valid,
                        ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> log_normalizer,
                        int64_t span, int32_t storage, int32_t isa) {
  Checker check;
  const Checker::Dims lead = LeadOf(query, 3);
  check.Require(query.dimensions().size() >= 4, "query must have at least 4 axes");
  check.Require(key.dimensions().size() >= 4, "key must have at least 4 axes");
  if (!check.ok()) return Failed(check.error());
  const auto* kgh = query.dimensions().end() - 3;
  const int64_t K = kgh[0], G = kgh[1], H = kgh[2];
  const int64_t S = key.dimensions().end()[-2];
  const int64_t B = Product(lead);
  const ffi::DataType type = StorageType(storage);
  const Kernels* kernels = KernelsFor(isa);
  check.KernelsOf(kernels, isa);
  check.HeadDim(H);
  check.Require(G >= 1 && G <= kMaxGroup,
                "query heads per kv head must be 1 to 16: got " + std::to_string(G));
  check.Require(span >= 0, "span must be at least 0: got " + std::to_string(span));
  check.Require(type != ffi::DataType::INVALID, "storage is unknown: " + std::to_string(storage));
  check.Buffer("query", query, ffi::DataType::F32, lead, {K, G, H});
  check.Buffer("key", key, type, lead, {K, S, H});
  check.Buffer("value", value, type, lead, {K, S, H});
  check.Buffer("length", length, ffi::DataType::S32, lead, {});
  check.Buffer("valid", valid, ffi::DataType::PRED, lead, {});
  check.Buffer("out", *out, ffi::DataType::F32, lead, {K, G, H});
  check.Buffer("log_normalizer", *log_normalizer, ffi::DataType::F32, lead, {K, G});
  if (!check.ok()) return Failed(check.error());

  const auto* q = static_cast<const float*>(query.untyped_data());
  auto* o = static_cast<float*>(out->untyped_data());
  auto* lse = static_cast<float*>(log_normalizer->untyped_data());
  const auto* lengths = static_cast<const int32_t*>(length.untyped_data());
  const auto* valids = static_cast<const uint8_t*>(valid.untyped_data());
  const auto keys_of = [&](int64_t b) {
    return span > 0 ? std::min<int64_t>(lengths[b], span) : lengths[b];
  };
  const auto usable = [&](int64_t b) { return valids[b] && lengths[b] >= 0 && lengths[b] <= S; };

  int64_t total = 0, keys = 0;
  for (int64_t b = 0; b < B; ++b) {
    if (!usable(b)) continue;
    total += K * ((keys_of(b) + kDenseKeys - 1) / kDenseKeys);
    keys += K * keys_of(b);
  }
  auto job = std::make_shared<Job>();
  job->kernels = kernels;
  job->storage = storage;
  job->acc.reset(new float[total * G * H]);
  job->state.reset(new float[total * G * 2]);
  job->pending.reset(new std::atomic<int64_t>[B * K]);
  job->chunks.reserve(total);
  job->merge_of.reserve(total);

  const int group = static_cast<int>(G), head_dim = static_cast<int>(H);
  for (int64_t bk = 0; bk < B * K; ++bk) {
    const int64_t b = bk / K;
    if (!usable(b)) {
      std::fill_n(o + bk * G * H, G * H, std::numeric_limits<float>::quiet_NaN());
      std::fill_n(lse + bk * G, G, std::numeric_limits<float>::quiet_NaN());
      continue;
    }
    const int64_t first = static_cast<int64_t>(job->chunks.size());
    const int64_t n = keys_of(b);
    const int64_t count = (n + kDenseKeys - 1) / kDenseKeys;
    const DenseMerge merge = {job->acc.get() + first * G * H,
                              job->state.get() + first * G * 2,
                              count,
                              group,
                              head_dim,
                              o + bk * G * H,
                              lse + bk * G};
    if (count == 0) {
      kernels->dense_merge[storage](merge);
      continue;
    }
    for (int64_t c = 0; c < count; ++c) {
      const int64_t row = bk * S + (lengths[b] - n) + c * kDenseKeys;
      const int64_t offset = row * H * StorageBytes(storage);
      job->chunks.push_back({q + bk * G * H, static_cast<const char*>(key.untyped_data()) + offset,
                             static_cast<const char*>(value.untyped_data()) + offset,
                             std::min(kDenseKeys, n - c * kDenseKeys), group, head_dim,
                             job->acc.get() + (first + c) * G * H,
                             job->state.get() + (first + c) * G * 2});
      job->merge_of.push_back(static_cast<int64_t>(job->merges.size()));
    }
    job->pending[job->merges.size()].store(count, std::memory_order_relaxed);
    job->merges.push_back(merge);
  }
  return ParallelFor(pool, total, keys * G * H * 2 < kSmall, [job](int64_t t) { job->Run(t); });
}

}  // namespace
}  // namespace certjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(certjax_dense_decode, certjax::Guarded<certjax::DenseDecode>::Call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()  // query
                                  .Arg<xla::ffi::AnyBuffer>()  // key
                                  .Arg<xla::ffi::AnyBuffer>()  // value
                                  .Arg<xla::ffi::AnyBuffer>()  // length
                                  .Arg<xla::ffi::AnyBuffer>()  // valid
                                  .Ret<xla::ffi::AnyBuffer>()  // out
                                  .Ret<xla::ffi::AnyBuffer>()  // log_normalizer
                                  .Attr<int64_t>("span")
                                  .Attr<int32_t>("storage")
                                  .Attr<int32_t>("isa"));
