// SPDX-License-Identifier: Apache-2.0
#include "modules.h"

#include <dlfcn.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "memory.h"
#include "settings.h"
#include "state.h"

namespace ptx {

// Layout of a fat binary. Header: u32 magic, u16 version, u16 header size, u64 size. Entries: u16
// kind (1: PTX), u32 header size at 4, u64 padded size at 8, u64 uncompressed size at 0x38 (0 when
// it is plain).
Module* register_fat_binary(const uint8_t* image) {
  auto* m = new Module;
  if (load<uint32_t>(image) != 0xBA55ED50) return m;
  const uint8_t* entry = image + load<uint16_t>(image + 6);
  const uint8_t* end = entry + load<uint64_t>(image + 8);
  const int wanted = settings().arch ? settings().arch : 999;
  while (entry < end) {
    const uint32_t header = load<uint32_t>(entry + 4);
    const uint64_t size = load<uint64_t>(entry + 8);
    if (load<uint16_t>(entry) == 1) {
      if (load<uint64_t>(entry + 0x38)) {
        std::fprintf(stderr,
                     "ptx_emulator: the PTX of this program is compressed; compile with nvcc "
                     "--no-compress\n");
        std::exit(2);
      }
      const char* text = reinterpret_cast<const char*>(entry + header);
      std::string ptx(text, strnlen(text, size));
      const size_t target = ptx.find(".target sm_");
      const int arch = target == std::string::npos ? 0 : std::atoi(ptx.c_str() + target + 11);
      // The newest PTX that the emulated device may run.
      if (arch <= wanted && arch >= m->arch) {
        if (arch > m->arch) m->ptx.clear();
        m->arch = arch;
        m->ptx.push_back(std::move(ptx));
      }
    }
    entry += header + size;
  }
  return m;
}

// FNV-1a over the text and everything else that decides the result. build.py computes the same.
std::string translated_path(const std::string& ptx, bool count) {
  uint64_t h = 1469598103934665603ull;
  auto mix = [&](const std::string& s) {
    for (unsigned char c : s) h = (h ^ c) * 1099511628211ull;
  };
  mix(ptx);
  mix(settings().toolchain);
  mix(count ? "count" : "");
  char name[32];
  std::snprintf(name, sizeof name, "/%016lx.so", (unsigned long)h);
  return settings().cache + name;
}

static const CompiledModule* compile(const std::string& ptx) {
  const Settings& s = settings();
  const std::string so = translated_path(ptx, s.count), base = so.substr(0, so.size() - 3);
  if (access(so.c_str(), R_OK)) {
    mkdir(s.cache.c_str(), 0777);
    const std::string own = base + "." + std::to_string(getpid());
    std::ofstream(own + ".ptx") << ptx;
    const std::string command = "cd '" + s.translator + "' && python3 build.py --translate '" +
                                own + ".ptx' '" + so + "'" + (s.count ? " --count" : "");
    const int failed = std::system(command.c_str());
    unlink((own + ".ptx").c_str());
    if (failed) {
      std::fprintf(stderr, "ptx_emulator: translation failed: %s\n", command.c_str());
      std::exit(2);
    }
  }
  void* handle = dlopen(so.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    std::fprintf(stderr, "ptx_emulator: %s\n", dlerror());
    std::exit(2);
  }
  auto* module = static_cast<const CompiledModule*>(dlsym(handle, "ptx_module"));
  for (uint32_t i = 0; i < module->variable_count; i++) {
    const Variable& v = module->variables[i];
    expose(v.address, v.size, true, v.constant, v.name);
  }
  return module;
}
static void ensure_compiled(Module* m) {
  if (!m->compiled.empty()) return;
  for (const std::string& ptx : m->ptx) m->compiled.push_back(compile(ptx));
}
const Kernel* kernel_of(RegisteredKernel& k) {
  if (k.kernel) return k.kernel;
  ensure_compiled(k.module);
  for (const CompiledModule* m : k.module->compiled)
    for (uint32_t i = 0; i < m->kernel_count; i++)
      if (k.name == m->kernels[i].name) return k.kernel = &m->kernels[i];
  report_host("the program has no PTX for kernel %s", k.name.c_str());
  return nullptr;
}
const Variable* variable_of(RegisteredVariable& v) {
  ensure_compiled(v.module);
  for (const CompiledModule* m : v.module->compiled)
    for (uint32_t i = 0; i < m->variable_count; i++)
      if (v.name == m->variables[i].name) return &m->variables[i];
  return nullptr;
}

}  // namespace ptx
