#include "dispatch/isa.h"

#include <cstddef>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace certjax {

CpuRegisters ReadCpuRegisters() {
  CpuRegisters r = {};
#if defined(__x86_64__)
  uint32_t eax, ebx, ecx, edx;
  r.max_leaf = __get_cpuid_max(0, nullptr);
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx)) r.leaf1_ecx = ecx;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) {
    r.leaf7_ebx = ebx;
    r.leaf7_ecx = ecx;
    if (eax >= 1 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx)) r.leaf71_eax = eax;
  }
  if (r.leaf1_ecx >> 27 & 1) {  // without OSXSAVE the instruction itself is illegal
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    r.xcr0 = uint64_t{high} << 32 | low;
  }
#endif
  return r;
}

std::vector<std::pair<const char*, bool>> CpuFeatures(const CpuRegisters& r) {
  // A hypervisor may hide one flag of a family, and a kernel may not save the registers that a flag
  // promises: ask for each feature and for the state it needs.
  const bool os = r.leaf1_ecx >> 27 & 1;
  const bool ymm = os && (r.xcr0 & 0x06) == 0x06;  // xmm and ymm
  const bool zmm = os && (r.xcr0 & 0xE6) == 0xE6;  // and masks, upper halves, upper sixteen
  const bool leaf7 = r.max_leaf >= 7;
  const auto bit = [](bool state, uint32_t word, int n) { return state && (word >> n & 1); };
  const bool avx = bit(ymm, r.leaf1_ecx, 28);
  return {
      {"avx2", avx && bit(leaf7, r.leaf7_ebx, 5)},
      {"fma", avx && bit(ymm, r.leaf1_ecx, 12)},
      {"f16c", avx && bit(ymm, r.leaf1_ecx, 29)},
      {"avx_vnni", avx && bit(leaf7, r.leaf71_eax, 4)},
      {"avx512f", avx && bit(zmm && leaf7, r.leaf7_ebx, 16)},
      {"avx512bw", avx && bit(zmm && leaf7, r.leaf7_ebx, 30)},
      {"avx512vl", avx && bit(zmm && leaf7, r.leaf7_ebx, 31)},
      {"avx512_vnni", avx && bit(zmm && leaf7, r.leaf7_ecx, 11)},
  };
}

std::vector<Isa> UsableLevels(const CpuRegisters& registers) {
  std::vector<Isa> levels = {kIsaScalar};
#if defined(__x86_64__)
  const auto features = CpuFeatures(registers);
  const auto all = [&](std::size_t first, std::size_t last) {
    bool ok = true;
    for (std::size_t i = first; i < last; ++i) ok = ok && features[i].second;
    return ok;
  };
  if (all(0, 3)) levels.push_back(kIsaAvx2);
  if (all(0, 4)) levels.push_back(kIsaAvxVnni);
  if (all(0, 3) && all(4, 8)) levels.push_back(kIsaAvx512);
#else
  (void)registers;
#endif
  return levels;
}

const std::vector<Isa>& AvailableLevels() {
  static const auto* levels = new std::vector<Isa>(UsableLevels(ReadCpuRegisters()));
  return *levels;
}

}  // namespace certjax
