// From an ISA level to its kernels.
#ifndef CERTJAX_DISPATCH_KERNELS_H_
#define CERTJAX_DISPATCH_KERNELS_H_

#include "kernels/types.h"

namespace certjax {

// The kernels of a level; kIsaAuto means the best one. Null where this machine cannot run it.
const Kernels* KernelsFor(int isa);

}  // namespace certjax

#endif  // CERTJAX_DISPATCH_KERNELS_H_
