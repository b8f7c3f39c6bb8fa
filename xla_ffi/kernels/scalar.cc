#include "kernels/lanes_scalar-inl.h"
#include "kernels/table-inl.h"

CERTJAX_DEFINE_KERNELS(kScalarKernels)
