// One kv head of a certified step: its memory, the order of its tasks, and what is reported.
#ifndef CERTJAX_HANDLERS_CERTIFIED_HEAD_H_
#define CERTJAX_HANDLERS_CERTIFIED_HEAD_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

#include "handlers/arena.h"
#include "kernels/types.h"

namespace certjax {

struct Task {
  enum Kind : int { kBegin, kScan, kRead, kEvaluate, kDense };
  int64_t head;
  Kind kind;
  int64_t index;  // chunk or query head
};

inline constexpr int kTaskKinds = Task::kDense + 1;

// Nanoseconds spent in tasks of each kind since the process began, over all threads; what follows a
// kind (plan, merge) counts with it.
inline std::array<std::atomic<int64_t>, kTaskKinds>& TaskTimes() {
  static std::array<std::atomic<int64_t>, kTaskKinds> times{};
  return times;
}

// Where the results of a kv head go: the fields of certjax.Certificate, [G] each, and the hint.
struct HeadResults {
  float* out;  // [G, H]
  bool *certified, *exact;
  float* error_bound;
  int32_t* level;
  float* threshold;
  int32_t *keys_read, *candidates;
  float *bytes_read, *log_normalizer, *value_scale_lower, *sufficient;
  int32_t* wait;
};

class HeadRun {
 public:
  CertifiedHead a = {};
  HeadResults results = {};
  const float* hint = nullptr;  // [G]
  int32_t waiting = 0;          // steps for which this head is computed exactly
  const Kernels* kernels = nullptr;
  int storage = 0;
  int64_t number = 0;    // of this head in the call
  float largest = 0.0f;  // number of the query's dtype
  bool usable = true;    // the row's inputs are finite and its length is possible
  bool failed = false;   // no memory

  // Runs one task and appends those that follow. Tasks of one kind may run at the same time.
  void Run(const Task& task, std::vector<Task>* more);

 private:
  void Work(const Task& task, std::vector<Task>* more);
  void Begin(std::vector<Task>* more);
  void NextLevel(std::vector<Task>* more);
  void BeginDense(std::vector<Task>* more);
  void Push(Task::Kind kind, int64_t count, std::vector<Task>* more);
  bool Reserve();
  void Carve(Layout* layout);
  void Finish();
  int32_t Wait() const;
  void Report(int g);
  void ReportUnusable(int g);

  Arena arena_;
  std::atomic<int64_t> pending_{0};
  std::vector<int> exact_heads_;  // computed by dense attention
  std::vector<DenseChunk> dense_chunks_;
  DenseMerge dense_ = {};
  float *dense_acc_ = nullptr, *dense_state_ = nullptr, *dense_query_ = nullptr,
        *dense_out_ = nullptr, *dense_log_ = nullptr;
};

}  // namespace certjax

#endif  // CERTJAX_HANDLERS_CERTIFIED_HEAD_H_
