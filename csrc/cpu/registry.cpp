// SPDX-License-Identifier: Apache-2.0
#include "cpu/registry.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace deltanet::cpu {
namespace {

struct Isa {
  const char* name;
  bool (*runs_here)();
  const Kernels* f32;
  const Bf16Kernels* bf16;
  bool has_dot2;  // in one instruction, so that kernels of bf16 pairs are faster than those of fp32
};

bool always() { return true; }

#if defined(__x86_64__)
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
#endif

// Best first.
constexpr Isa kIsas[] = {
#if defined(__x86_64__)
    {"avx512_bf16", has_avx512_bf16, &avx512::kernels_f32, &avx512_bf16::kernels_bf16, true},
    {"avx512", has_avx512, &avx512::kernels_f32, &avx512::kernels_bf16, false},
    {"avx2", has_avx2, &avx2::kernels_f32, &avx2::kernels_bf16, false},
#elif defined(__aarch64__)
    {"neon", always, &neon::kernels_f32, &neon::kernels_bf16, false},
#endif
    {"scalar", always, &scalar::kernels_f32, &scalar::kernels_bf16, false},
};

std::string joined(const std::vector<std::string>& names) {
  std::string list;
  for (const std::string& name : names) list += (list.empty() ? "" : ", ") + name;
  return list;
}

const Isa& find(const std::string& name, const char* origin) {
  for (const Isa& isa : kIsas)
    if (name == isa.name) {
      if (isa.runs_here()) return isa;
      throw std::invalid_argument(std::string(origin) + ": this CPU cannot run '" + name +
                                  "'; supported here: " + joined(available_isas()));
    }
  throw std::invalid_argument(std::string(origin) + ": unknown instruction set '" + name +
                              "'; supported here: " + joined(available_isas()));
}

const Isa& chosen_without_force() {
  const char* wanted = std::getenv("DELTANET_CPU_ISA");
  if (wanted && *wanted) return find(wanted, "DELTANET_CPU_ISA");
  for (const Isa& isa : kIsas)
    if (isa.runs_here()) return isa;
  return kIsas[sizeof(kIsas) / sizeof(kIsas[0]) - 1];
}

std::atomic<const Isa*> forced{nullptr};
std::atomic<Bf16Products> bf16_products{Bf16Products::kNever};

const Isa& active() {
  if (const Isa* isa = forced.load(std::memory_order_relaxed)) return *isa;
  static const Isa& chosen =
      chosen_without_force();  // asked once: a call must not read the environment
  return chosen;
}

}  // namespace

std::vector<std::string> built_isas() {
  std::vector<std::string> names;
  for (const Isa& isa : kIsas) names.emplace_back(isa.name);
  return names;
}

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Isa& isa : kIsas)
    if (isa.runs_here()) names.emplace_back(isa.name);
  return names;
}

std::string active_isa() { return active().name; }

void force_isa(const std::string& name) {
  forced.store(name.empty() ? nullptr : &find(name, "force_cpu_isa"), std::memory_order_relaxed);
}

void set_bf16_products(Bf16Products when) { bf16_products.store(when, std::memory_order_relaxed); }

const Kernels& kernels_f32() { return *active().f32; }
const Bf16Kernels* kernels_bf16() {
  const Isa& isa = active();
  const Bf16Products when = bf16_products.load(std::memory_order_relaxed);
  const bool wanted =
      when == Bf16Products::kAlways || (when == Bf16Products::kWhereFaster && isa.has_dot2);
  return wanted ? isa.bf16 : nullptr;
}
const Kernels& kernels_f64() { return scalar::kernels_f64; }

}  // namespace deltanet::cpu
