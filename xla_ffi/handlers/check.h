// Checks of what a handler is given. Python has checked before with friendlier words; here nothing
// is trusted that memory is indexed with.
#ifndef CERTJAX_HANDLERS_CHECK_H_
#define CERTJAX_HANDLERS_CHECK_H_

#include <cstdint>
#include <initializer_list>
#include <string>

#include "dispatch/kernels.h"
#include "kernels/types.h"
#include "xla/ffi/api/ffi.h"

namespace certjax {

// The dtype of stored keys and values; INVALID for an unknown `storage`.
inline xla::ffi::DataType StorageType(int storage) {
  using xla::ffi::DataType;
  return storage == kBfloat16  ? DataType::U16
         : storage == kFloat16 ? DataType::F16
         : storage == kFloat32 ? DataType::F32
                               : DataType::INVALID;
}

inline int64_t StorageBytes(int storage) { return storage == kFloat32 ? 4 : 2; }

// Collects the first complaint.
class Checker {
 public:
  using Dims = xla::ffi::AnyBuffer::Dimensions;

  void Require(bool ok, const std::string& message) {
    if (!ok && message_.empty()) message_ = message;
  }

  // The buffer is of `type` and has the dimensions `lead` (the batch axes, vmap's included), then
  // `rest`.
  void Buffer(const char* name, const xla::ffi::AnyBuffer& buffer, xla::ffi::DataType type,
              Dims lead, std::initializer_list<int64_t> rest) {
    const Dims dims = buffer.dimensions();
    bool same = buffer.element_type() == type && dims.size() == lead.size() + rest.size();
    for (size_t i = 0; same && i < lead.size(); ++i) same = dims[i] == lead[i];
    for (size_t i = 0; same && i < rest.size(); ++i)
      same = dims[lead.size() + i] == rest.begin()[i];
    Require(same,
            std::string(name) + " has another dtype or shape than the other operands ask for");
  }

  void HeadDim(int64_t head_dim) {
    Require(
        head_dim >= kLanes && head_dim <= kMaxHeadDim && head_dim % kLanes == 0,
        "head_dim must be a multiple of 16 between 16 and 512: got " + std::to_string(head_dim));
  }

  void KernelsOf(const Kernels* kernels, int isa) {
    Require(kernels != nullptr,
            "ISA level " + std::to_string(isa) + " is not available on this machine");
  }

  bool ok() const { return message_.empty(); }
  xla::ffi::Error error() const { return xla::ffi::Error::InvalidArgument(message_); }

 private:
  std::string message_;
};

// The batch axes of a buffer: all but the last `rest` ones; none where the rank is too small.
inline Checker::Dims LeadOf(const xla::ffi::AnyBuffer& buffer, size_t rest) {
  const Checker::Dims dims = buffer.dimensions();
  return Checker::Dims(dims.begin(), dims.size() < rest ? 0 : dims.size() - rest);
}

// Modulo 2⁶⁴: the rows themselves wherever each has memory, and 0 where an axis is 0.
inline int64_t Product(Checker::Dims dims) {
  uint64_t n = 1;
  for (int64_t d : dims) n *= static_cast<uint64_t>(d);
  return static_cast<int64_t>(n);
}

}  // namespace certjax

#endif  // CERTJAX_HANDLERS_CHECK_H_
