#include "dispatch/kernels.h"

#include <algorithm>

#include "dispatch/isa.h"

namespace certjax {

const Kernels* KernelsFor(int isa) {
  const auto& levels = AvailableLevels();
  if (isa == kIsaAuto) isa = levels.back();
  if (std::find(levels.begin(), levels.end(), isa) == levels.end()) return nullptr;
#if defined(__x86_64__)
  if (isa == kIsaAvx512) return &kAvx512Kernels;
  if (isa == kIsaAvxVnni) return &kAvxVnniKernels;
  if (isa == kIsaAvx2) return &kAvx2Kernels;
#endif
  return &kScalarKernels;
}

}  // namespace certjax
