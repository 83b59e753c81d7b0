// SPDX-License-Identifier: Apache-2.0
// Device memory: which addresses exist, which bytes were written, and who touched each word last
// (the race check).
#pragma once
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace ptx {

struct Thread;

// The last plain write, as the race check remembers it. Atomic and volatile ones do not replace it:
// whoever is unordered with the plain one is so whatever its writer did later.
struct Stamp {
  uint32_t block = 0;  // serial of the block; 0: none
  uint32_t time = 0;
  int32_t site = 0;
  uint16_t thread = 0;
  bool pending = false;  // a cp.async that nobody has waited for
  bool atomics = false;  // since then others wrote, too, and stand among the readers
};
// Lanes of one warp that read at the same time since that write, or wrote by atomic, volatile or
// relaxed accesses (`strong`), which may meet each other unordered.
struct Readers {
  uint32_t block = 0, time = 0, lanes = 0;
  int32_t site = 0;
  uint16_t warp = 0;
  bool strong = false, writes = false;
};
// One word of memory. Two groups of readers fit, which is what most words see; more make a list.
struct Cell {
  Stamp write;
  Readers readers[2];
  int32_t many = 0;   // 1 + index of a list of further readers; 0: none
  int32_t split = 0;  // 1 + index of the word's four bytes, kept apart as cells of their own; 0:
                      // the word is one
};
static_assert(sizeof(Cell) <= 64);

// What the cells of a part of memory keep elsewhere.
struct Extras {
  std::mutex mutex;         // blocks of two workers may meet in global memory
  std::vector<Cell> bytes;  // four per split word
  std::vector<int32_t> free_bytes;
  std::vector<std::vector<Readers>> lists;
  std::vector<int32_t> free_lists;
};
struct Shadow {
  static constexpr int kParts = 16;  // taken in turn by stretches of 256 bytes
  Cell* cells = nullptr;
  size_t words = 0;
  Extras parts[kParts];
  void resize(size_t bytes);  // to at least this; only ever grows
  void clear();
  ~Shadow() { clear(); }
};

struct Allocation {
  uint64_t address;
  size_t size;
  bool owned, read_only;
  const char* name;                // of a __device__ or __constant__ variable
  uint8_t* initialised = nullptr;  // a flag per byte; null: all of it is
  Shadow shadow;
  std::vector<uint8_t> sectors_read,
      sectors_written;  // count mode: 32-byte sectors touched by this launch
  Allocation(uint64_t address, size_t size, bool owned, bool read_only, const char* name)
      : address(address), size(size), owned(owned), read_only(read_only), name(name) {}
  ~Allocation();
};

// The table changes only between launches, so workers read it without a lock and keep what they
// found by page.
struct PageCache {
  uint64_t version = 0;
  struct Entry {
    uint64_t page = ~0ull;
    Allocation* allocation = nullptr;
  } entries[256];
};

void* allocate(size_t bytes);
bool release(void* pointer);
// Memory of others that kernels may touch: a tensor's storage, a launch's parameters, a __device__
// variable.
void expose(const void* pointer, size_t bytes, bool initialised, bool read_only = false,
            const char* name = nullptr);
void conceal(const void* pointer);
Allocation* find_allocation(uint64_t address);
void mark_written(const void* pointer, size_t bytes);  // by the host
void mark_unwritten(const void* pointer, size_t bytes);
void copy_flags(void* to, const void* from,
                size_t bytes);  // a copy on the device brings unwritten bytes along
std::vector<Allocation*>& allocations();

void check_access(Thread*, Shadow&, uint64_t offset, uint32_t size, int site, bool reads,
                  bool writes, bool strong, bool pending, bool is_shared);
void settle_async(Thread*, uint8_t* to, uint32_t size, int site);

}  // namespace ptx
