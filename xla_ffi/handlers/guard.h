// What a handler throws becomes an error of the call: nothing may be thrown into XLA.
#ifndef CERTJAX_HANDLERS_GUARD_H_
#define CERTJAX_HANDLERS_GUARD_H_

#include <exception>
#include <type_traits>
#include <utility>

#include "handlers/parallel.h"
#include "xla/ffi/api/ffi.h"

namespace certjax {

// handler(args…), which must not throw once it has given work to other threads. Only allocations
// throw: std::bad_alloc, or std::length_error where a size is beyond all memory.
template <auto handler>
struct Guarded;
template <typename Result, typename... Args, Result (*handler)(Args...)>
struct Guarded<handler> {
  static Result Call(Args... args) {
    try {
      return handler(std::move(args)...);
    } catch (const std::exception&) {
      if constexpr (std::is_same_v<Result, xla::ffi::Future>) {
        return Failed(NoMemory());
      } else {
        return NoMemory();
      }
    }
  }
};

}  // namespace certjax

#endif  // CERTJAX_HANDLERS_GUARD_H_
