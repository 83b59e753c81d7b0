// SPDX-License-Identifier: Apache-2.0
//
// Which instruction sets were built, which of them this CPU can run, and which one is in use.
#pragma once
#include <string>
#include <vector>

#include "cpu/kernels.h"

namespace deltanet::cpu {

// Best first.
std::vector<std::string> built_isas();
std::vector<std::string> available_isas();

// The forced one, else the one that DELTANET_CPU_ISA names, else the best available.
// Throws std::invalid_argument where that variable names one that is unknown or cannot run here.
std::string active_isa();

// Forces an instruction set for the whole process; an empty name goes back to the choice above.
// Throws std::invalid_argument, naming what can be had, for any other name.
void force_isa(const std::string& name);

// Whether bf16 inputs may be multiplied in pairs of bf16, for the whole process. Never, by default.
enum class Bf16Products {
  kNever,
  kWhereFaster,  // where the CPU multiplies a pair in one instruction
  kAlways,       // for tests
};
void set_bf16_products(Bf16Products when);

// Null where products are to be in fp32.
const Bf16Kernels* kernels_bf16();

// Kernels of the active instruction set. fp64 has scalar kernels only.
const Kernels& kernels_f32();
const Kernels& kernels_f64();

}  // namespace deltanet::cpu
