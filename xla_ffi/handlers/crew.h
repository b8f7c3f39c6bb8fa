// Tasks that give rise to further tasks, on XLA's thread pool.
#ifndef CERTJAX_HANDLERS_CREW_H_
#define CERTJAX_HANDLERS_CREW_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "handlers/parallel.h"
#include "xla/ffi/api/ffi.h"

namespace certjax {

// A stack of tasks that several threads work off. Job has
//   void Run(const Task&, std::vector<Task>* more)  any thread; `more` are the tasks that follow
//   bool failed() const                             there was no memory
// and the work is over when no task waits or runs. Newest tasks first: they find their data in the
// cache, and few pieces of work are under way at a time.
template <typename Job, typename Task>
class Crew : public std::enable_shared_from_this<Crew<Job, Task>> {
 public:
  Crew(Job job, std::vector<Task> tasks) : job_(std::move(job)), tasks_(std::move(tasks)) {
    waiting_.store(static_cast<int64_t>(tasks_.size()));
    unfinished_.store(static_cast<int64_t>(tasks_.size()));
  }

  // Works here and on `helpers` threads of the pool. The pool cannot be asked from a task (its
  // context ends with the call), so helpers are asked for once; they wait a moment where nothing is
  // to be done, then leave, and whoever still works finishes. Never waits for a task that no thread
  // has begun.
  xla::ffi::Future Start(xla::ffi::ThreadPool& pool, int64_t helpers) {
    if (tasks_.empty()) return Done();
    xla::ffi::Future future(promise_);
    auto self = this->shared_from_this();
    try {
      for (int64_t i = 0; i < helpers; ++i) pool.Schedule([self]() { self->Work(); });
    } catch (const std::bad_alloc&) {  // fewer helpers, then
    }
    Work();
    return future;
  }

 private:
  static constexpr auto kPatience = std::chrono::microseconds(50);

  bool Pop(Task* task) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (tasks_.empty()) return false;
    *task = tasks_.back();
    tasks_.pop_back();
    waiting_.store(static_cast<int64_t>(tasks_.size()), std::memory_order_relaxed);
    return true;
  }

  bool Push(const std::vector<Task>& more) {
    std::lock_guard<std::mutex> lock(mutex_);
    try {
      tasks_.reserve(tasks_.size() + more.size());
    } catch (const std::bad_alloc&) {
      no_memory_.store(true, std::memory_order_relaxed);
      return false;
    }
    // The first of them is to be taken first.
    tasks_.insert(tasks_.end(), more.rbegin(), more.rend());
    waiting_.store(static_cast<int64_t>(tasks_.size()), std::memory_order_relaxed);
    return true;
  }

  bool Wait() {
    const auto start = std::chrono::steady_clock::now();
    while (unfinished_.load(std::memory_order_acquire) > 0) {
      if (waiting_.load(std::memory_order_relaxed) > 0) return true;
      if (std::chrono::steady_clock::now() - start > kPatience) return false;
      std::this_thread::yield();
    }
    return false;
  }

  void End() {
    if (job_.failed() || no_memory_.load(std::memory_order_relaxed)) {
      promise_.SetError(NoMemory());
    } else {
      promise_.SetAvailable();
    }
  }

  void Work() {
    ScopedFloatState float_state;
    std::vector<Task> more;
    Task task;
    do {
      while (Pop(&task)) {
        more.clear();
        try {
          job_.Run(task, &more);
          const auto count = static_cast<int64_t>(more.size());
          unfinished_.fetch_add(count, std::memory_order_relaxed);
          if (!Push(more)) unfinished_.fetch_sub(count, std::memory_order_relaxed);
        } catch (const std::bad_alloc&) {  // nothing may cross into XLA
          no_memory_.store(true, std::memory_order_relaxed);
        }
        if (unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) End();
      }
    } while (Wait());
  }

  Job job_;
  std::mutex mutex_;
  std::vector<Task> tasks_;
  std::atomic<int64_t> waiting_{0};     // tasks in the stack
  std::atomic<int64_t> unfinished_{0};  // tasks in the stack or under way
  std::atomic<bool> no_memory_{false};
  xla::ffi::Promise promise_;
};

}  // namespace certjax

#endif  // CERTJAX_HANDLERS_CREW_H_
