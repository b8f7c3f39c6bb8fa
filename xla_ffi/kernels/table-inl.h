// The kernels of one ISA level, to be included last. Constant initialised: nothing of an ISA file
// runs before the CPU has been asked.
#ifndef CERTJAX_KERNELS_TABLE_INL_H_
#define CERTJAX_KERNELS_TABLE_INL_H_

#include "kernels/append-inl.h"
#include "kernels/dense_decode-inl.h"
#include "kernels/evaluate-inl.h"
#include "kernels/project-inl.h"

#define CERTJAX_FOR_STORAGE(fn) {fn<Bf16>, fn<F16>, fn<float>}

#define CERTJAX_DEFINE_KERNELS(name)                                           \
  namespace certjax {                                                          \
  constexpr Kernels name = {                                                   \
      CERTJAX_FOR_STORAGE(RunDenseChunk),  CERTJAX_FOR_STORAGE(RunDenseMerge), \
      CERTJAX_FOR_STORAGE(RunAppendHead),  CERTJAX_FOR_STORAGE(RunAllFinite),  \
      CERTJAX_FOR_STORAGE(RunPrepare),     RunScan,                            \
      CERTJAX_FOR_STORAGE(RunPlan),        CERTJAX_FOR_STORAGE(RunRead),       \
      CERTJAX_FOR_STORAGE(RunEvaluate),    CERTJAX_FOR_STORAGE(RunProject),    \
      CERTJAX_FOR_STORAGE(RunProjectMerge)};                                   \
  }

#endif  // CERTJAX_KERNELS_TABLE_INL_H_
