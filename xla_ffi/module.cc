// The Python module certjax._native: the handlers, and what is known about build and machine.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <type_traits>
#include <vector>

#include "dispatch/isa.h"
#include "handlers/certified_head.h"
#include "handlers/handlers.h"
#include "handlers/parallel.h"

namespace nb = nanobind;

namespace certjax {
namespace {

template <typename Fn>
nb::capsule Handler(Fn* fn) {
  static_assert(std::is_invocable_r_v<XLA_FFI_Error*, Fn, XLA_FFI_CallFrame*>,
                "not an XLA FFI handler");
  return nb::capsule(reinterpret_cast<void*>(fn));
}

std::vector<std::string> Names(const std::vector<Isa>& levels) {
  std::vector<std::string> names;
  for (Isa level : levels) names.emplace_back(kIsaNames[level]);
  return names;
}

NB_MODULE(_native, m) {
  m.def("registrations", [] {
    nb::dict handlers;
    handlers["certjax_append"] = Handler(certjax_append);
    handlers["certjax_dense_decode"] = Handler(certjax_dense_decode);
    handlers["certjax_certified_decode"] = Handler(certjax_certified_decode);
    handlers["certjax_project"] = Handler(certjax_project);
    handlers["certjax_scan"] = Handler(certjax_scan);
    return handlers;
  });
  m.def("build_info", [] {
    nb::dict info;
    info["ffi_api_version"] = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
    info["compiler"] = __VERSION__;
    nb::list levels;
#if defined(__x86_64__)
    for (const char* name : kIsaNames) levels.append(name);
#else
    levels.append(kIsaNames[kIsaScalar]);
#endif
    info["isa_levels"] = nb::tuple(levels);
    return info;
  });
  m.def("isa_levels", [] { return Names(AvailableLevels()); });
  m.def("cpu_features", [] {
    nb::dict features;
    for (const auto& [name, usable] : CpuFeatures(ReadCpuRegisters())) features[name] = usable;
    return features;
  });
  m.def(
      "usable_levels",
      [](uint32_t max_leaf, uint32_t leaf1_ecx, uint32_t leaf7_ebx, uint32_t leaf7_ecx,
         uint32_t leaf71_eax, uint64_t xcr0) {
        return Names(UsableLevels({max_leaf, leaf1_ecx, leaf7_ebx, leaf7_ecx, leaf71_eax, xcr0}));
      },
      nb::arg("max_leaf"), nb::arg("leaf1_ecx"), nb::arg("leaf7_ebx"), nb::arg("leaf7_ecx"),
      nb::arg("leaf71_eax"), nb::arg("xcr0"));
  m.def("task_times", [] {
    constexpr const char* kNames[kTaskKinds] = {"prepare", "scan", "read", "evaluate", "dense"};
    nb::dict times;
    for (int i = 0; i < kTaskKinds; ++i) {
      times[kNames[i]] = TaskTimes()[i].load(std::memory_order_relaxed);
    }
    return times;
  });
  m.def("seen_threads", [] { return SeenThreads().load(std::memory_order_relaxed); });
}

}  // namespace
}  // namespace certjax
