#include "kernels/lanes_avx2-inl.h"
#include "kernels/table-inl.h"

CERTJAX_DEFINE_KERNELS(kAvxVnniKernels)
