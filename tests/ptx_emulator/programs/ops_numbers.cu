// SPDX-License-Identifier: Apache-2.0
// Instructions of one thread, against plain formulas: one program, because nvcc and g++ read
// headers for longer than they work on any of these files.
#include "cases.cuh"
#include "ops_bits.cuh"
#include "ops_convert.cuh"
#include "ops_float.cuh"
#include "ops_half.cuh"
#include "ops_integer.cuh"

int main() { return cases::run_all(); }
