// Which ISA levels this process may use. Compiled at the floor of the architecture.
#ifndef CERTJAX_DISPATCH_ISA_H_
#define CERTJAX_DISPATCH_ISA_H_

#include <cstdint>
#include <utility>
#include <vector>

namespace certjax {

// Ascending: a later level is preferred. The numbers are the `isa` attribute of the FFI calls.
enum Isa : int {
  kIsaAuto = -1,
  kIsaScalar = 0,
  kIsaAvx2 = 1,
  kIsaAvxVnni = 2,
  kIsaAvx512 = 3,
  kIsaLevels = 4
};

inline constexpr const char* kIsaNames[kIsaLevels] = {"scalar", "avx2", "avxvnni", "avx512"};

// What the processor and the operating system say; all zero on other architectures.
struct CpuRegisters {
  uint32_t max_leaf;   // cpuid 0, eax
  uint32_t leaf1_ecx;  // cpuid 1
  uint32_t leaf7_ebx;  // cpuid 7.0
  uint32_t leaf7_ecx;
  uint32_t leaf71_eax;  // cpuid 7.1; 0 where there is no such subleaf
  uint64_t
      xcr0;  // xgetbv 0: register state that the system saves; read only where cpuid 1 has OSXSAVE
};

CpuRegisters ReadCpuRegisters();

// The features that the levels are compiled with, by name, and whether they may be used.
std::vector<std::pair<const char*, bool>> CpuFeatures(const CpuRegisters& registers);

// The levels that such a machine can run, ascending. A pure function, so that tests can ask about
// any machine.
std::vector<Isa> UsableLevels(const CpuRegisters& registers);

// The same for this machine, asked once.
const std::vector<Isa>& AvailableLevels();

}  // namespace certjax

#endif  // CERTJAX_DISPATCH_ISA_H_
