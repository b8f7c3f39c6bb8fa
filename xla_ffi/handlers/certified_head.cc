#include "handlers/certified_head.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>

#include "handlers/check.h"

namespace certjax {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int32_t kWait = 32;  // WAIT of certjax/cost.py

int64_t DenseChunks(const CertifiedHead& a) {
  return (a.attend_end - a.attend_begin + kDenseKeys - 1) / kDenseKeys;
}

double Norm(const float* x, int64_t n) {
  double square = 0.0;
  for (int64_t i = 0; i < n; ++i) square += double{x[i]} * x[i];
  return std::sqrt(square);
}

}  // namespace

void HeadRun::Carve(Layout* layout) {
  const int64_t G = a.group, H = a.head_dim;
  const int64_t dense = DenseChunks(a);
  layout->Take(&dense_query_, G * H);
  layout->Take(&dense_out_, G * H);
  layout->Take(&dense_log_, G);
  layout->Take(&dense_state_, dense * G * 2);
  layout->Take(&dense_acc_, dense * G * H);
  if (a.levels == 0) return;
  const int64_t window = WindowKeys(a), chunks = Chunks(a);
  layout->Take(&a.ordered, G * H);
  layout->Take(&a.minus_step, G * H);
  layout->Take(&a.inverse_step, G * H);
  layout->Take(&a.lane_query, G * H);
  layout->Take(&a.lane_center, H);
  layout->Take(&a.window_score, G * window);
  layout->Take(&a.window_square, window);
  layout->Take(&a.window_first, G * H);
  layout->Take(&a.center, G * H);
  layout->Take(&a.chunk, chunks);
  layout->Take(&a.entries, chunks);
  layout->Take(&a.upper, Blocks(a) * kBlock * G);
  layout->Take(&a.estimate, chunks * (kChunkBlocks + 3) * G * kLanes);
  layout->Take(&a.later, chunks);
  layout->Take(&a.later_index, chunks * kSegment);
  layout->Take(&a.later_bound, chunks * G * kSegment);
  layout->Take(&a.index, chunks * kSegment);
  layout->Take(&a.size, chunks * kSegment);
  layout->Take(&a.noise, chunks * kSegment);
  layout->Take(&a.square, chunks * kSegment);
  layout->Take(&a.score, chunks * G * kSegment);
  layout->Take(&a.log_size, chunks * G * kSegment);
  if (a.promise.full) {
    layout->Take(&a.scatter, G * H * H);
    layout->Take(&a.scatter_part, G * 2 * H * H);
    layout->Take(&a.scatter_rows, G * 2 * kLanes * H);
  }
  if (a.promise.measure == kDenominator) {
    layout->Take(&a.scan_score, Blocks(a) * kBlock * G);
    layout->Take(&a.half_width, Blocks(a) * kBlock * G);
    layout->Take(&a.scan_chunk, chunks * G);
  }
}

bool HeadRun::Reserve() {
  Layout count(nullptr);
  Carve(&count);
  if (!arena_.Reserve(count.bytes())) return false;
  Layout deal(arena_.data());
  Carve(&deal);
  return true;
}

void HeadRun::Push(Task::Kind kind, int64_t count, std::vector<Task>* more) {
  pending_.store(count, std::memory_order_relaxed);
  for (int64_t i = 0; i < count; ++i) more->push_back({number, kind, i});
}

void HeadRun::Run(const Task& task, std::vector<Task>* more) {
  const auto start = std::chrono::steady_clock::now();
  Work(task, more);
  const std::chrono::nanoseconds spent = std::chrono::steady_clock::now() - start;
  TaskTimes()[task.kind].fetch_add(spent.count(), std::memory_order_relaxed);
}

void HeadRun::Work(const Task& task, std::vector<Task>* more) {
  switch (task.kind) {
    case Task::kBegin:
      Begin(more);
      return;
    case Task::kScan:
      kernels->scan(a, task.index);
      break;
    case Task::kRead:
      kernels->read[storage](a, task.index);
      break;
    case Task::kEvaluate:
      if (a.state[task.index].running) kernels->evaluate[storage](a, static_cast<int>(task.index));
      break;
    case Task::kDense:
      kernels->dense_chunk[storage](dense_chunks_[task.index]);
      break;
  }
  if (pending_.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  switch (task.kind) {  // this was the last of its kind
    case Task::kScan:
      kernels->plan[storage](a, hint);
      NextLevel(more);
      break;
    case Task::kRead:
      Push(Task::kEvaluate, a.group, more);
      break;
    case Task::kEvaluate:
      NextLevel(more);
      break;
    default:
      kernels->dense_merge[storage](dense_);
      Finish();
  }
}

void HeadRun::Begin(std::vector<Task>* more) {
  if (!usable || !Reserve()) {
    failed = usable;
    for (int g = 0; g < a.group; ++g) ReportUnusable(g);
  } else if (a.levels == 0) {
    BeginDense(more);
  } else {
    kernels->prepare[storage](a);
    Push(Task::kScan, Chunks(a), more);
  }
}

void HeadRun::NextLevel(std::vector<Task>* more) {
  bool certified = true;
  for (int g = 0; g < a.group; ++g) certified &= a.state[g].certified;
  if (BeginRound(a)) {
    Push(Task::kRead, Chunks(a), more);
  } else if (!certified) {
    BeginDense(more);
  } else {
    Finish();
  }
}

// The heads that no level certified, by dense attention.
void HeadRun::BeginDense(std::vector<Task>* more) {
  const int H = a.head_dim;
  exact_heads_.clear();
  for (int g = 0; g < a.group; ++g) {
    if (a.levels > 0 && a.state[g].certified) continue;
    std::copy_n(a.query + g * H, H, dense_query_ + exact_heads_.size() * H);
    exact_heads_.push_back(g);
  }
  const int heads = static_cast<int>(exact_heads_.size());
  const int64_t chunks = DenseChunks(a);
  dense_ = {dense_acc_, dense_state_, chunks, heads, H, dense_out_, dense_log_};
  dense_chunks_.clear();
  for (int64_t c = 0; c < chunks; ++c) {
    const int64_t first = a.attend_begin + c * kDenseKeys;
    const int64_t offset = first * H * StorageBytes(storage);
    dense_chunks_.push_back({dense_query_, static_cast<const char*>(a.key) + offset,
                             static_cast<const char*>(a.value) + offset,
                             std::min(kDenseKeys, a.attend_end - first), heads, H,
                             dense_acc_ + c * heads * H, dense_state_ + c * heads * 2});
  }
  if (chunks > 0) {
    Push(Task::kDense, chunks, more);
  } else {
    kernels->dense_merge[storage](dense_);
    Finish();
  }
}

void HeadRun::Finish() {
  const int H = a.head_dim;
  for (int g = 0; g < a.group; ++g) Report(g);
  for (size_t i = 0; i < exact_heads_.size(); ++i) {
    const int g = exact_heads_[i];
    float* out = results.out + g * H;
    std::copy_n(dense_out_ + i * H, H, out);
    results.exact[g] = true;
    results.level[g] = -1;
    results.threshold[g] = -kInf;
    results.error_bound[g] = 0.0f;
    results.keys_read[g] = results.candidates[g] =
        static_cast<int32_t>(std::max<int64_t>(a.pool_end - a.pool_begin, 0));
    results.log_normalizer[g] = dense_log_[i];
    // M ≥ ‖o‖
    const double lower = 1 - 1e-5 - Rounding(a, Norm(a.query + g * H, H) * a.key_norm_max);
    results.value_scale_lower[g] = static_cast<float>(Norm(out, H) * std::max(lower, 0.0));
  }
  for (int g = 0; g < a.group; ++g) {
    const float* out = results.out + g * H;
    const double reach = Norm(a.query + g * H, H) * a.key_norm_max;
    bool finite = reach < 1e37 && results.log_normalizer[g] < kInf;
    for (int c = 0; c < H; ++c) finite = finite && std::fabs(out[c]) <= largest;
    if (!finite) ReportUnusable(g);
  }
  const int32_t wait = Wait();
  for (int g = 0; g < a.group; ++g) results.wait[g] = wait;
  arena_.Release();
}

// What certjax/cost.py and _next_hint of reference.py decide.
int32_t HeadRun::Wait() const {
  if (waiting > 0) return waiting - 1;
  bool exact = false, any = false;
  float keys = 0.0f;
  for (int g = 0; g < a.group; ++g) {
    exact |= results.exact[g];
    any |= results.certified[g];
    keys += static_cast<float>(results.keys_read[g]);
  }
  const float pool = static_cast<float>(std::max<int64_t>(a.pool_end - a.pool_begin, 0));
  const float attended = static_cast<float>(a.attend_end - a.attend_begin);
  const bool pays = 9 * pool + 100 * keys + 10000 < 20 * attended;
  return a.levels > 0 && any && !a.always_sample && (exact || !pays) ? kWait : 0;
}

// What a sampled head found.
void HeadRun::Report(int g) {
  const int H = a.head_dim;
  const int64_t pool = std::max<int64_t>(a.pool_end - a.pool_begin, 0);
  const double row = static_cast<double>(H) * StorageBytes(storage);
  double rows = 2.0 * pool;  // where one head of the group read all
  int64_t candidates = 0;
  if (a.levels > 0) {
    int64_t values = 0;
    for (int64_t k = 0; k < Chunks(a); ++k) {
      candidates += a.entries[k];
      const float* square = a.square + k * kSegment;
      values += std::count_if(square, square + a.entries[k], [](float x) { return x >= 0; });
    }
    if (exact_heads_.empty()) rows = static_cast<double>(candidates + values);
  }
  const double scan = a.levels > 0 ? pool * (H / 2 + 2.0 * H / kBlock + 4.5) : 0.0;
  const double window = a.attend_end - a.attend_begin - pool;
  results.bytes_read[g] = static_cast<float>((rows * row + 2 * row * window + scan) / a.group);
  results.certified[g] = true;
  results.exact[g] = false;
  results.sufficient[g] = waiting > 0 ? hint[g] : -1.0f;
  if (a.levels == 0) return;
  const LevelState& s = a.state[g];
  results.sufficient[g] = s.sufficient;
  if (!s.certified) return;
  for (int c = 0; c < H; ++c) {
    const double y = a.center[g * H + c] + a.value_center[c] / a.unit;
    results.out[g * H + c] = static_cast<float>(y * a.unit);
  }
  const float unit = static_cast<float>(a.unit);
  results.error_bound[g] = s.bound * unit;
  results.level[g] = s.level;
  results.threshold[g] = s.log_tau;
  results.keys_read[g] = static_cast<int32_t>(s.keys);
  results.candidates[g] = static_cast<int32_t>(candidates);
  results.log_normalizer[g] = s.c + std::log(std::max(s.denominator, 1e-30f));
  results.value_scale_lower[g] = s.scale_lower * unit;
}

// Nothing is claimed: invalid row, or arithmetic that overflowed.
void HeadRun::ReportUnusable(int g) {
  std::fill_n(results.out + g * a.head_dim, a.head_dim, kNan);
  results.certified[g] = results.exact[g] = false;
  results.error_bound[g] = kInf;
  results.level[g] = -1;
  results.threshold[g] = -kInf;
  results.keys_read[g] = results.candidates[g] = 0;
  results.bytes_read[g] = 0.0f;
  results.log_normalizer[g] = kNan;
  results.value_scale_lower[g] = 0.0f;
  results.sufficient[g] = waiting > 0 ? hint[g] : -1.0f;
  results.wait[g] = std::max(waiting - 1, 0);
}

}  // namespace certjax
