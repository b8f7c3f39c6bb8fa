// Memory of a step, kept between calls: fresh pages for every call would cost more than the step.
#ifndef CERTJAX_HANDLERS_ARENA_H_
#define CERTJAX_HANDLERS_ARENA_H_

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace certjax {

// 64-byte aligned memory from a list of idle blocks; goes back to it at the end.
class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() { Release(); }

  // False where there is no memory. What was held is lost.
  bool Reserve(size_t bytes) {
    Release();
    Idle& idle = TheIdle();
    {
      std::lock_guard<std::mutex> lock(idle.mutex);
      if (!idle.blocks.empty()) {
        block_ = std::move(idle.blocks.back());
        idle.blocks.pop_back();
      }
    }
    if (block_.bytes < bytes) {
      block_.data.reset();
      const size_t rounded = (bytes + bytes / 4 + 4095) / 4096 * 4096;  // contexts grow
      block_.data.reset(static_cast<char*>(std::aligned_alloc(64, rounded)));
      block_.bytes = block_.data ? rounded : 0;
    }
#if defined(__SANITIZE_ADDRESS__)
    if (block_.data) __asan_poison_memory_region(block_.data.get(), block_.bytes);
#endif
    return block_.data != nullptr;
  }

  void Release() {
    if (!block_.data) return;
    Idle& idle = TheIdle();
    std::lock_guard<std::mutex> lock(idle.mutex);
    if (idle.blocks.size() < kIdle) idle.blocks.push_back(std::move(block_));
    block_ = {};
  }

  char* data() const { return block_.data.get(); }

 private:
  static constexpr size_t kIdle = 16;  // blocks that wait for the next call

  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  struct Block {
    std::unique_ptr<char, Free> data;
    size_t bytes = 0;
  };
  struct Idle {
    std::mutex mutex;
    std::vector<Block> blocks;
    Idle() { blocks.reserve(kIdle); }
  };

  static Idle& TheIdle() {
    static Idle* idle = new Idle;  // never destroyed: threads may outlive static objects
    return *idle;
  }

  Block block_;
};

// Deals out parts of a block, or without a block counts how large it must be.
class Layout {
 public:
  explicit Layout(char* base) : base_(base) {}

  template <typename T>
  void Take(T** out, int64_t count) {
    const size_t size = static_cast<size_t>(count) * sizeof(T);
    if (base_ != nullptr) *out = reinterpret_cast<T*>(base_ + bytes_);
#if defined(__SANITIZE_ADDRESS__)  // only what is dealt out may be touched, not the gaps between
    if (base_ != nullptr) __asan_unpoison_memory_region(base_ + bytes_, size);
    bytes_ += 64;
#endif
    bytes_ += (size + 63) / 64 * 64;
  }

  size_t bytes() const { return bytes_; }

 private:
  char* base_;
  size_t bytes_ = 0;
};

}  // namespace certjax

#endif  // CERTJAX_HANDLERS_ARENA_H_
