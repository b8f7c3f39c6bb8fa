#include "kernels/lanes_avx512-inl.h"
#include "kernels/table-inl.h"

CERTJAX_DEFINE_KERNELS(kAvx512Kernels)
