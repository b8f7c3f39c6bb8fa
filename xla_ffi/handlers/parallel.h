// Work on XLA's thread pool without ever waiting on it.
#ifndef CERTJAX_HANDLERS_PARALLEL_H_
#define CERTJAX_HANDLERS_PARALLEL_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <new>
#include <utility>

#include "xla/ffi/api/ffi.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace certjax {

// Round to nearest, keep subnormals, trap nothing; restored at the end of the scope. XLA's threads
// flush subnormals to zero, which breaks upper bounds, and not all of them need agree.
class ScopedFloatState {
 public:
#if defined(__x86_64__)
  ScopedFloatState() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~ScopedFloatState() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  ScopedFloatState() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
    __asm__ volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~ScopedFloatState() { __asm__ volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#endif
};

inline xla::ffi::Future Done() {
  xla::ffi::Promise promise;
  promise.SetAvailable();
  return xla::ffi::Future(promise);
}

inline xla::ffi::Future Failed(xla::ffi::Error error) {
  xla::ffi::Promise promise;
  xla::ffi::Future future(promise);
  promise.SetError(std::move(error));
  return future;
}

// Short enough to need no memory itself.
inline xla::ffi::Error NoMemory() {
  return xla::ffi::Error(xla::ffi::ErrorCode::kResourceExhausted, "no memory left");
}

// The size of the pool that the last handler saw; 0 if none ran yet, or where unknown.
inline std::atomic<int64_t>& SeenThreads() {
  static std::atomic<int64_t> seen{0};
  return seen;
}

// Runs fn(0) … fn(tasks − 1), here or on the pool, in any order; the future is ready when all are
// done. `fn` is copied: it must own what it needs. The memory of buffers lives until the future is
// ready, their descriptors do not: capture pointers, never an AnyBuffer. A
// handler that waited for its tasks instead would hang on a pool of one thread.
template <typename Fn>
xla::ffi::Future ParallelFor(xla::ffi::ThreadPool& pool, int64_t tasks, bool small, Fn fn) {
  const int64_t threads = pool.num_threads();
  SeenThreads().store(threads, std::memory_order_relaxed);
  if (small || tasks <= 1 || threads <= 1) {
    ScopedFloatState float_state;
    for (int64_t t = 0; t < tasks; ++t) fn(t);
    return Done();
  }
  xla::ffi::CountDownPromise done(tasks);
  xla::ffi::Future future(done);
  for (int64_t t = 0; t < tasks; ++t) {
    auto task = [fn, t, done]() mutable {
      {
        ScopedFloatState float_state;
        fn(t);
      }
      done.CountDown();
    };
    try {
      pool.Schedule([task]() mutable { task(); });
    } catch (const std::bad_alloc&) {  // tasks run already: this one must, too
      task();
    }
  }
  return future;
}

// The same for short tasks: this thread works too, begins at once, and asks for no more help than
// there is work. Nobody waits for anybody; who comes late finds nothing to do.
template <typename Fn>
xla::ffi::Future ParallelForHere(xla::ffi::ThreadPool& pool, int64_t tasks, bool small, Fn fn) {
  const int64_t threads = pool.num_threads();
  if (small || tasks <= 1 || threads <= 1) return ParallelFor(pool, tasks, true, fn);
  SeenThreads().store(threads, std::memory_order_relaxed);
  auto next = std::make_shared<std::atomic<int64_t>>(0);
  xla::ffi::CountDownPromise done(tasks);
  xla::ffi::Future future(done);
  auto work = [fn, next, tasks, done]() mutable {
    ScopedFloatState float_state;
    for (int64_t t; (t = next->fetch_add(1, std::memory_order_relaxed)) < tasks;) {
      fn(t);
      done.CountDown();
    }
  };
  for (int64_t i = 0; i + 1 < std::min(threads, tasks); ++i) {
    try {
      pool.Schedule([work]() mutable { work(); });
    } catch (const std::bad_alloc&) {  // then without help
      break;
    }
  }
  work();
  return future;
}

}  // namespace certjax

#endif  // CERTJAX_HANDLERS_PARALLEL_H_
