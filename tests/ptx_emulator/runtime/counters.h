// SPDX-License-Identifier: Apache-2.0
// Count mode: what decides the speed of a kernel, per launch. See README.md for the meaning of each
// number.
#pragma once
#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "device.h"

namespace ptx {

struct Launch;
struct Worker;

enum Traffic {
  kFromGlobal,
  kToGlobal,
  kFromShared,
  kToShared,
  kMatrixTraffic,
  kAsyncFromGlobal,
  kAsyncToShared,
  kAtomicGlobal,
  kAtomicShared,
  kTraffics
};

// One access site: `passes` are 32-byte sectors (global) or wavefronts (shared), `least` what the
// bytes alone would take.
struct SiteTotals {
  uint64_t requests = 0, bytes = 0, passes = 0, least = 0;
};
struct Counts {
  std::map<std::pair<int, int>, SiteTotals> sites;  // (Traffic, site)
  std::map<std::string, uint64_t> matrix;           // warp-level MMA by shape and type
  uint64_t barriers = 0, warp_barriers = 0;
  std::array<uint64_t, kInstructionClasses> executed{};
  void add(const Counts& other);
};

struct LoggedAccess {
  uint64_t address;
  uint32_t size, lane;
};
// Accesses of one warp since its lanes last met, grouped into requests: the n-th execution of a
// site by each lane.
struct WarpLog {
  std::unordered_map<uint64_t, std::vector<LoggedAccess>>
      requests;                                       // key: n << 32 | traffic << 28 | site
  std::unordered_map<uint64_t, uint32_t> executions;  // key: lane << 32 | traffic << 28 | site
};
struct AccessLog {
  std::vector<WarpLog> warps;
};

void log_access(Thread*, int site, Traffic, uint64_t address, uint32_t size);
void fold_warp(struct Block*,
               uint32_t warp);  // its lanes are together: what was logged is complete
void fold_block(struct Block*);
void count_matrix(Thread*, const char* name);
void count_matrix_rows(Thread*, int site, int count, const uint64_t* offsets);
void write_counts(Launch&);

}  // namespace ptx
