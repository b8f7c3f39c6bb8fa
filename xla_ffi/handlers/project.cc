// certjax_project: products of a few rows with one or more matrices of weights.
#include <algorithm>
#include <memory>
#include <vector>

#include "handlers/check.h"
#include "handlers/crew.h"
#include "handlers/handlers.h"

namespace certjax {
namespace {

namespace ffi = xla::ffi;

// Below this many bytes of weights (some 20 µs) the pool costs more than it gives.
constexpr int64_t kSmall = 1 << 18;

// Outputs of a task: two tasks a thread for balance, but long runs (kernels/project-inl.h), and
// sums that stay in the cache.
constexpr int64_t kFewest = 256, kMost = 8192;

struct Part {
  ProjectTask task;
  int storage;
};

struct Job {
  const Kernels* kernels;

  void Run(const Part& part, std::vector<Part>*) { kernels->project[part.storage](part.task); }
  bool failed() const { return false; }
};

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
  const int64_t threads = pool.num_threads();
  SeenThreads().store(threads, std::memory_order_relaxed);

  std::vector<Part> parts;
  int64_t bytes = 0;
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
    const int64_t even = (O / (2 * std::max<int64_t>(threads, 1)) + 63) / 64 * 64;
    const int64_t width = std::clamp(even, kFewest, kMost);
    for (int64_t begin = 0; R > 0 && begin < O; begin += width) {
      parts.push_back({{static_cast<const float*>(x.untyped_data()), weight->untyped_data(), R, I,
                        O, transposed, begin, std::min(begin + width, O),
                        static_cast<float*>((*out)->untyped_data())},
                       storage});
    }
    bytes += static_cast<int64_t>(weight->size_bytes());
  }
  const int64_t useful = std::min(threads, static_cast<int64_t>(parts.size())) - 1;
  const int64_t helpers = bytes < kSmall ? 0 : std::max<int64_t>(useful, 0);
  auto crew = std::make_shared<Crew<Job, Part>>(Job{kernels}, std::move(parts));
  return crew->Start(pool, helpers);
}

}  // namespace
}  // namespace certjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(certjax_project, certjax::Project,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()  // x
                                  .RemainingArgs()             // weights
                                  .RemainingRets()             // a result for each
                                  .Attr<bool>("transposed")
                                  .Attr<int32_t>("isa"));
