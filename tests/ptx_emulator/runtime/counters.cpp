// SPDX-License-Identifier: Apache-2.0
#include "counters.h"

#include <cxxabi.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "state.h"

namespace ptx {

static const char* const kTrafficName[] = {"global_load",  "global_store",  "shared_load",
                                           "shared_store", "matrix",        "async_global",
                                           "async_shared", "global_atomic", "shared_atomic"};
static const char* const kClassName[] = {
    "integer",     "float32",      "float64",     "half",       "special",     "convert",
    "move",        "control",      "parameter",   "local",      "global_load", "global_store",
    "shared_load", "shared_store", "matrix_load", "async_copy", "atomic",      "mma",
    "collective",  "barrier",      "fence"};
static_assert(std::size(kTrafficName) == kTraffics && std::size(kClassName) == kInstructionClasses);

static bool in_shared(int traffic) {
  return traffic == kFromShared || traffic == kToShared || traffic == kMatrixTraffic ||
         traffic == kAsyncToShared || traffic == kAtomicShared;
}

void Counts::add(const Counts& other) {
  for (auto& [key, x] : other.sites) {
    SiteTotals& mine = sites[key];
    mine.requests += x.requests, mine.bytes += x.bytes, mine.passes += x.passes,
        mine.least += x.least;
  }
  for (auto& [name, n] : other.matrix) matrix[name] += n;
  barriers += other.barriers;
  warp_barriers += other.warp_barriers;
  for (size_t i = 0; i < executed.size(); i++) executed[i] += other.executed[i];
}

// ---- from single accesses to requests of a warp ----

void log_access(Thread* t, int site, Traffic traffic, uint64_t address, uint32_t size) {
  Worker* w = t->block->worker;
  if (w->log.warps.size() <= t->warp) w->log.warps.resize(t->warp + 1);
  WarpLog& log = w->log.warps[t->warp];
  const uint64_t key = uint64_t(traffic) << 28 | uint32_t(site);
  const uint64_t n = log.executions[uint64_t(t->lane) << 32 | key]++;
  log.requests[n << 32 | key].push_back({address, size, t->lane});
}

// How often the banks must be read: the distinct words of the fullest of the 32 banks.
static uint64_t bank_passes(const std::vector<LoggedAccess>& accesses) {
  std::vector<uint64_t> words;
  for (const LoggedAccess& x : accesses)
    for (uint64_t word = x.address / 4; word * 4 < x.address + x.size; word++)
      words.push_back(word);
  std::sort(words.begin(), words.end());
  words.erase(std::unique(words.begin(), words.end()), words.end());
  uint64_t in_bank[32] = {}, worst = 1;
  for (uint64_t word : words) worst = std::max(worst, ++in_bank[word % 32]);
  return worst;
}
static void fold(Counts& counts, int traffic, int site, const std::vector<LoggedAccess>& request) {
  SiteTotals& total = counts.sites[{traffic, site}];
  total.requests++;
  uint64_t bytes = 0;
  for (const LoggedAccess& x : request) bytes += x.size;
  total.bytes += bytes;
  if (in_shared(traffic)) {
    // 8-byte accesses are served by half warps, 16-byte ones by quarter warps.
    const uint32_t lanes = request[0].size >= 16 ? 8 : request[0].size == 8 ? 16 : 32;
    for (uint32_t first = 0; first < 32; first += lanes) {
      std::vector<LoggedAccess> group;
      for (const LoggedAccess& x : request)
        if (x.lane >= first && x.lane < first + lanes) group.push_back(x);
      if (group.empty()) continue;
      total.passes += bank_passes(group);
      total.least++;
    }
    return;
  }
  std::vector<uint64_t> sectors;
  uint64_t low = ~0ull, high = 0;
  for (const LoggedAccess& x : request) {
    for (uint64_t s = x.address / 32; s * 32 < x.address + x.size; s++) sectors.push_back(s);
    low = std::min(low, x.address), high = std::max(high, x.address + x.size);
  }
  std::sort(sectors.begin(), sectors.end());
  total.passes += uint64_t(std::unique(sectors.begin(), sectors.end()) - sectors.begin());
  std::vector<LoggedAccess> distinct = request;  // lanes that read the same bytes need them once
  std::sort(distinct.begin(), distinct.end(),
            [](auto& x, auto& y) { return x.address < y.address; });
  uint64_t needed = 0, end = 0;
  for (const LoggedAccess& x : distinct) {
    const uint64_t from = std::max(end, x.address);
    if (x.address + x.size > from) needed += x.address + x.size - from;
    end = std::max(end, x.address + x.size);
  }
  total.least += (needed + 31) / 32;
}
void fold_warp(Block* b, uint32_t warp) {
  Worker* w = b->worker;
  if (w->log.warps.size() <= warp) return;
  for (auto& [key, request] : w->log.warps[warp].requests)
    fold(w->counts, int(key >> 28 & 15), int(key & 0xfffffff), request);
  w->log.warps[warp].requests.clear();
  w->log.warps[warp].executions.clear();
}
void fold_block(Block* b) {
  for (uint32_t warp = 0; warp < b->worker->log.warps.size(); warp++) fold_warp(b, warp);
}
void count_matrix(Thread* t, const char* name) { t->block->worker->counts.matrix[name]++; }
void count_matrix_rows(Thread* t, int site, int count, const uint64_t* offsets) {
  SiteTotals& total = t->block->worker->counts.sites[{kMatrixTraffic, site}];
  total.requests++;
  total.bytes += uint64_t(count) * 128;
  for (int j = 0; j < count; j++) {
    std::vector<LoggedAccess> rows;
    for (int i = 0; i < 8; i++) rows.push_back({offsets[j * 8 + i], 16, uint32_t(i)});
    total.passes += bank_passes(rows);
    total.least++;
  }
}

// ---- one JSON object per launch ----

static std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + '"';
}
static std::string number(uint64_t n) { return std::to_string(n); }
static std::string list(const Extent& e) {
  return "[" + number(e.x) + ", " + number(e.y) + ", " + number(e.z) + "]";
}

void write_counts(Launch& launch) {
  const Counts& c = launch.counts;
  int status = 0;
  char* readable = abi::__cxa_demangle(launch.kernel->name, nullptr, nullptr, &status);
  std::string out = "{\"kernel\": " + quoted(readable ? readable : launch.kernel->name);
  std::free(readable);
  out += ", \"grid\": " + list(launch.grid) + ", \"block\": " + list(launch.block) +
         ", \"shared_bytes\": " + number(launch.kernel->static_shared + launch.dynamic_shared);
  SiteTotals sums[kTraffics];
  for (auto& [key, x] : c.sites) {
    SiteTotals& s = sums[key.first];
    s.requests += x.requests, s.bytes += x.bytes, s.passes += x.passes, s.least += x.least;
  }
  uint64_t read = 0, written = 0;
  for (Allocation* a : allocations()) {
    read += uint64_t(std::count(a->sectors_read.begin(), a->sectors_read.end(), 1));
    written += uint64_t(std::count(a->sectors_written.begin(), a->sectors_written.end(), 1));
  }
  out += ", \"global\": {\"distinct_bytes_read\": " + number(read * 32) +
         ", \"distinct_bytes_written\": " + number(written * 32);
  for (int traffic :
       {int(kFromGlobal), int(kToGlobal), int(kAsyncFromGlobal), int(kAtomicGlobal)}) {
    const SiteTotals& s = sums[traffic];
    if (s.requests)
      out += ", \"" + std::string(kTrafficName[traffic]) +
             "\": {\"requests\": " + number(s.requests) + ", \"bytes\": " + number(s.bytes) +
             ", \"sectors\": " + number(s.passes) + ", \"least_sectors\": " + number(s.least) + "}";
  }
  out += "}, \"shared\": {";
  const char* comma = "";
  for (int traffic : {int(kFromShared), int(kToShared), int(kMatrixTraffic), int(kAsyncToShared),
                      int(kAtomicShared)}) {
    const SiteTotals& s = sums[traffic];
    if (!s.requests) continue;
    out += comma + ("\"" + std::string(kTrafficName[traffic])) +
           "\": {\"requests\": " + number(s.requests) + ", \"bytes\": " + number(s.bytes) +
           ", \"wavefronts\": " + number(s.passes) +
           ", \"conflicts\": " + number(s.passes - s.least) + "}";
    comma = ", ";
  }
  out += "}, \"mma\": {";
  comma = "";
  for (auto& [name, n] : c.matrix) {
    out += comma + quoted(name) + ": " + number(n);
    comma = ", ";
  }
  // Every warp that reaches a block barrier counts once there, as the hardware issues it.
  out += "}, \"barriers\": {\"block\": " + number(c.barriers) +
         ", \"warp\": " + number(c.warp_barriers) + "}, \"instructions\": {";
  comma = "";
  uint64_t total = 0;
  for (int i = 0; i < kInstructionClasses; i++) {
    total += c.executed[size_t(i)];
    if (!c.executed[size_t(i)]) continue;
    out += comma + ("\"" + std::string(kClassName[i])) + "\": " + number(c.executed[size_t(i)]);
    comma = ", ";
  }
  out += "}, \"thread_instructions\": " + number(total) + ", \"sites\": [";
  comma = "";
  for (auto& [key, x] : c.sites) {
    const Site& site = launch.kernel->sites[key.second];
    out += comma + ("{\"kind\": \"" + std::string(kTrafficName[key.first])) +
           "\", \"ptx_line\": " + number(uint64_t(site.line)) + ", \"ptx\": " + quoted(site.text) +
           ", \"source\": " + quoted(site.where) + ", \"requests\": " + number(x.requests) +
           ", \"bytes\": " + number(x.bytes) + ", \"" +
           (in_shared(key.first) ? "wavefronts" : "sectors") + "\": " + number(x.passes) +
           ", \"least\": " + number(x.least) + "}";
    comma = ", ";
  }
  out += "]}\n";
  if (settings().count_file.empty()) {
    std::fputs(out.c_str(), stderr);
    return;
  }
  std::FILE* file = std::fopen(settings().count_file.c_str(), "a");
  if (!file) {
    std::perror(settings().count_file.c_str());
    return;
  }
  std::fputs(out.c_str(), file);
  std::fclose(file);
}

}  // namespace ptx
