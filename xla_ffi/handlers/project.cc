// certjax_project: products of a few rows with one or more matrices of weights.
#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "handlers/arena.h"
#include "handlers/check.h"
#include "handlers/guard.h"
#include "handlers/handlers.h"
#include "handlers/parallel.h"

namespace certjax {
namespace {

namespace ffi = xla::ffi;

// Below this many bytes of weights (some 80 µs) the pool costs more than it gives.
constexpr int64_t kSmall = 1 << 20;

// Outputs of a task: as many as possible (kernels/project-inl.h), but two tasks a thread for
// balance, and sums that stay in the second-level cache. Rows of a transposed matrix follow each
// other anyway.
constexpr int64_t kFewest = 1024, kFewestTransposed = 64, kMost = 16384;

struct Matrix {
  const void* weight;
  float* out;
  int64_t outputs;
  int storage;
};

struct Part {
  ProjectTask task;
  int storage;
  int64_t merge;  // −1 where the task gives the result itself
};

struct Merge {
  ProjectMerge merge;
  std::atomic<int64_t> pending;  // slabs that are not done
};

struct Job {
  const Kernels* kernels;
  std::vector<Part> parts;
  std::unique_ptr<Merge[]> merges;
  Arena sums;

  void Run(int64_t t) {
    const Part& part = parts[t];
    kernels->project[part.storage](part.task);
    if (part.merge < 0) return;
    Merge& m = merges[part.merge];
    if (m.pending.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      kernels->project_merge[part.storage](m.merge);
    }
  }
};

int64_t Ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }

// kStorages for dtypes that are none of weights.
int StorageOf(ffi::DataType type) {
  return type == ffi::DataType::BF16  ? kBfloat16
         : type == ffi::DataType::F16 ? kFloat16
         : type == ffi::DataType::F32 ? kFloat32
                                      : kStorages;
}

ffi::Future Project(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs weights,
                    ffi::RemainingRets results, bool transposed, int32_t isa) {
  Checker check;
  const Kernels* kernels = KernelsFor(isa);
  check.KernelsOf(kernels, isa);
  check.Require(x.element_type() == ffi::DataType::F32 && x.dimensions().size() == 2,
                "x must be float32 with 2 axes");
  check.Require(weights.size() == results.size(), "every weight has one result");
  if (!check.ok()) return Failed(check.error());
  const int64_t R = x.dimensions()[0], I = x.dimensions()[1];
  const auto* x_data = static_cast<const float*>(x.untyped_data());
  const int64_t threads = pool.num_threads();
  SeenThreads().store(threads, std::memory_order_relaxed);

  std::vector<Matrix> matrices;
  int64_t bytes = 0, padded = 0;
  for (size_t k = 0; k < weights.size(); ++k) {
    const auto weight = weights.get<ffi::AnyBuffer>(k);
    if (!weight) return Failed(weight.error());
    auto out = results.get<ffi::AnyBuffer>(k);
    if (!out) return Failed(out.error());
    const int storage = StorageOf(weight->element_type());
    check.Require(storage != kStorages, "a weight must be bfloat16, float16 or float32");
    check.Require(weight->dimensions().size() == 2, "a weight must have 2 axes");
    if (!check.ok()) return Failed(check.error());
    const auto dims = weight->dimensions();
    const int64_t O = dims[transposed ? 0 : 1];
    check.Require(dims[transposed ? 1 : 0] == I, "x and a weight differ in the number of inputs");
    check.Buffer("a result", **out, ffi::DataType::F32, {}, {R, O});
    if (!check.ok()) return Failed(check.error());
    if (R * O == 0) continue;
    matrices.push_back(
        {weight->untyped_data(), static_cast<float*>((*out)->untyped_data()), O, storage});
    bytes += static_cast<int64_t>(weight->size_bytes());
    padded += Ceil(O, kLanes) * kLanes;
  }
  const int64_t slabs = transposed ? 1 : std::max<int64_t>(Ceil(I, kSlab), 1);
  const int64_t whole = std::max<int64_t>(slabs * static_cast<int64_t>(matrices.size()), 1);
  const int64_t tiles = Ceil(2 * std::max<int64_t>(threads, 1), whole);
  const auto width = [&](const Matrix& m) {
    const int64_t even = Ceil(Ceil(m.outputs, tiles), 64) * 64;
    return std::clamp(even, transposed ? kFewestTransposed : kFewest, kMost);
  };

  auto job = std::make_shared<Job>();
  job->kernels = kernels;
  float* sums = nullptr;
  if (!transposed) {
    int64_t merges = 0;
    for (const Matrix& m : matrices) merges += Ceil(m.outputs, width(m));
    job->merges = std::make_unique<Merge[]>(merges);
    Layout count(nullptr);
    count.Take(&sums, slabs * R * padded);
    if (!job->sums.Reserve(count.bytes())) {
      return Failed(ffi::Error(ffi::ErrorCode::kResourceExhausted, "no memory for sums"));
    }
    Layout(job->sums.data()).Take(&sums, slabs * R * padded);
  }
  int64_t merge = -1;
  for (const Matrix& m : matrices) {
    const int64_t size = R * Ceil(m.outputs, kLanes) * kLanes;  // of the sums of a slab
    for (int64_t begin = 0; begin < m.outputs; begin += width(m)) {
      const int64_t end = std::min(begin + width(m), m.outputs);
      if (!transposed) {
        job->merges[++merge].merge = {sums, slabs, R, m.outputs, begin, end, m.out};
        job->merges[merge].pending.store(slabs, std::memory_order_relaxed);
      }
      for (int64_t s = 0; s < slabs; ++s) {
        const int64_t first = s * kSlab, last = std::min(first + kSlab, I);
        float* out = transposed ? m.out : sums + s * size;
        job->parts.push_back(
            {{x_data, m.weight, R, I, m.outputs, transposed, begin, end, first, last, out},
             m.storage,
             merge});
      }
    }
    if (!transposed) sums += slabs * size;
  }
  const auto tasks = static_cast<int64_t>(job->parts.size());
  return ParallelForHere(pool, tasks, bytes < kSmall, [job](int64_t t) { job->Run(t); });
}

}  // namespace
}  // namespace certjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(certjax_project, certjax::Guarded<certjax::Project>::Call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()  // x
                                  .RemainingArgs()             // weights
                                  .RemainingRets()             // a result for each
                                  .Attr<bool>("transposed")
                                  .Attr<int32_t>("isa"));
