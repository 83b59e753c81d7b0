// SPDX-License-Identifier: Apache-2.0
// Device code as nvcc registers it: PTX in a fat binary, translated and compiled when one of its
// kernels is first used.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "device.h"

namespace ptx {

struct Module {
  int arch = 0;  // of the PTX that was chosen
  std::vector<std::string> ptx;
  std::vector<const CompiledModule*> compiled;
};
struct RegisteredKernel {
  Module* module = nullptr;
  std::string name;
  const Kernel* kernel = nullptr;
  int max_dynamic_shared = 48 << 10;
};
struct RegisteredVariable {
  Module* module = nullptr;
  std::string name;
};

Module* register_fat_binary(const uint8_t* image);
const Kernel* kernel_of(RegisteredKernel&);
const Variable* variable_of(RegisteredVariable&);
std::string translated_path(const std::string& ptx, bool count);  // what the cache calls it

}  // namespace ptx
