// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "state.h"

namespace ptx {

// ---- the table of allocations ----

std::vector<Allocation*>& allocations() {
  static auto* table = new std::vector<Allocation*>;  // sorted by address
  return *table;
}
static uint64_t table_version = 1;

static auto position(uint64_t address) {
  auto& table = allocations();
  return std::upper_bound(table.begin(), table.end(), address,
                          [](uint64_t a, const Allocation* x) { return a < x->address; });
}
static Allocation* insert(Allocation* a) {
  allocations().insert(position(a->address), a);
  table_version++;
  return a;
}
static void* map_pages(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    std::perror("ptx_emulator: mmap");
    std::abort();
  }
  return p;
}

void Shadow::resize(size_t size) {
  const size_t wanted = (size + 3) / 4;
  if (wanted <= words) return;
  clear();
  cells = static_cast<Cell*>(map_pages(wanted * sizeof(Cell)));
  words = wanted;
}
void Shadow::clear() {
  if (cells) munmap(cells, words * sizeof(Cell));
  cells = nullptr;
  words = 0;
  for (Extras& x : parts) {
    x.bytes.clear(), x.free_bytes.clear();
    x.lists.clear(), x.free_lists.clear();
  }
}
Allocation::~Allocation() { std::free(initialised); }

// A stretch of unmapped addresses follows each allocation, so that one array's overrun is not
// another array.
static constexpr size_t kGap = 1 << 20;

static size_t mapped_bytes(size_t n) { return (std::max<size_t>(n, 1) + 4095) / 4096 * 4096; }

void* allocate(size_t n) {
  auto* p = static_cast<uint8_t*>(map_pages(mapped_bytes(n) + kGap));
  mprotect(p + mapped_bytes(n), kGap, PROT_NONE);
  std::memset(p, 0xff, n);  // NaN in every float format
  Allocation* a = insert(new Allocation(reinterpret_cast<uint64_t>(p), n, true, false, nullptr));
  a->initialised = static_cast<uint8_t*>(std::calloc(n ? n : 1, 1));
  return p;
}
static void erase(Allocation* a) {
  auto& table = allocations();
  table.erase(std::find(table.begin(), table.end(), a));
  table_version++;
  delete a;
}
bool release(void* pointer) {
  Allocation* a = find_allocation(reinterpret_cast<uint64_t>(pointer));
  if (!a || !a->owned || a->address != reinterpret_cast<uint64_t>(pointer)) return false;
  munmap(pointer, mapped_bytes(a->size) + kGap);
  erase(a);
  return true;
}
void expose(const void* pointer, size_t bytes, bool initialised, bool read_only, const char* name) {
  if (!bytes) return;
  // What was known of these addresses is out of date.
  const uint64_t begin = reinterpret_cast<uint64_t>(pointer);
  for (size_t i = allocations().size(); i-- > 0;) {
    Allocation* a = allocations()[i];
    if (!a->owned && a->address < begin + bytes && begin < a->address + a->size) erase(a);
  }
  Allocation* a =
      insert(new Allocation(reinterpret_cast<uint64_t>(pointer), bytes, false, read_only, name));
  if (!initialised) a->initialised = static_cast<uint8_t*>(std::calloc(bytes, 1));
}
void conceal(const void* pointer) {
  Allocation* a = find_allocation(reinterpret_cast<uint64_t>(pointer));
  if (a && !a->owned && a->address == reinterpret_cast<uint64_t>(pointer)) erase(a);
}
Allocation* find_allocation(uint64_t address) {
  auto at = position(address);
  if (at == allocations().begin()) return nullptr;
  Allocation* a = *--at;
  return address < a->address + std::max<size_t>(a->size, 1) ? a : nullptr;
}
static void set_flags(const void* pointer, size_t bytes, int value) {
  const uint64_t address = reinterpret_cast<uint64_t>(pointer);
  Allocation* a = find_allocation(address);
  if (a && a->initialised)
    std::memset(a->initialised + (address - a->address), value,
                std::min(bytes, a->address + a->size - address));
}
void mark_written(const void* pointer, size_t bytes) { set_flags(pointer, bytes, 1); }
void mark_unwritten(const void* pointer, size_t bytes) { set_flags(pointer, bytes, 0); }
void copy_flags(void* to, const void* from, size_t bytes) {
  const uint64_t to_address = reinterpret_cast<uint64_t>(to),
                 from_address = reinterpret_cast<uint64_t>(from);
  Allocation *t = find_allocation(to_address), *f = find_allocation(from_address);
  if (!t || !t->initialised || !f || !f->initialised) return mark_written(to, bytes);
  if (to_address + bytes > t->address + t->size || from_address + bytes > f->address + f->size)
    return;
  std::memcpy(t->initialised + (to_address - t->address),
              f->initialised + (from_address - f->address), bytes);
}

static Allocation* find_cached(Worker* w, uint64_t address, uint32_t size) {
  PageCache& cache = w->pages;
  if (cache.version != table_version) {
    for (auto& e : cache.entries) e.page = ~0ull;
    cache.version = table_version;
  }
  auto& entry = cache.entries[(address >> 12) % 256];
  if (entry.page == address >> 12 && address >= entry.allocation->address &&
      address + size <= entry.allocation->address + entry.allocation->size)
    return entry.allocation;
  Allocation* a = find_allocation(address);
  if (!a || address + size > a->address + a->size) return nullptr;
  entry = {address >> 12, a};
  return a;
}

// ---- the race check ----

namespace {

const char* const kWhy[] = {"", "a __syncthreads or __syncwarp must stand between",
                            "no barrier, fence or atomic leads from one to the other"};

struct Current {  // the access under way
  Thread* t;
  Block* b;
  int site;
  bool reads, writes, strong, pending, is_shared;
  uint64_t offset;
};
struct Conflict {              // the earlier access that nothing orders before the one under way
  const char* kind = nullptr;  // null: there is none
  uint32_t block = 0, thread = 0;
  int site = 0;
  bool pending = false;
};

// Whether an earlier access happened before the one under way.
bool ordered(const Current& a, uint32_t block, uint32_t thread, uint32_t time) {
  const Thread* t = a.t;
  if (block == a.b->serial)
    return time <= a.b->floor || thread == t->index || (t->known && t->known->covers(thread, time));
  // What a block finds in shared memory from the one before it is not there; earlier launches are
  // done; 0 is nobody.
  if (a.is_shared || block < a.b->launch->first_serial) return true;
  return foreign_known(t, block, thread, time);
}
bool ordered(const Current& a, const Stamp& s) { return ordered(a, s.block, s.thread, s.time); }

[[noreturn]] void race(const Current& a, const Conflict& c) {
  const char* later = a.reads && a.writes ? "atomic update" : a.writes ? "write" : "read";
  const std::string other = describe_site(*a.b->launch, c.site);
  const std::string who =
      c.block == a.b->serial ? describe_thread(*a.b, c.thread) : "a thread of another block";
  const char* where = a.is_shared ? "shared memory" : "global memory";
  if (c.pending)
    fault(a.t, a.site, kRace,
          "%s of %s at offset 0x%lx, where the asynchronous copy of %s has not been waited for\n  "
          "other    %s",
          later, where, (unsigned long)a.offset, who.c_str(), other.c_str());
  fault(a.t, a.site, kRace, "%s of %s at offset 0x%lx after a %s by %s: %s\n  other    %s", later,
        where, (unsigned long)a.offset, c.kind, who.c_str(), kWhy[a.is_shared ? 1 : 2],
        other.c_str());
}

std::vector<Readers>& list_of(Extras& x, const Cell& cell) {
  return x.lists[size_t(cell.many - 1)];
}

int32_t new_list(Extras& x) {
  if (x.free_lists.empty()) {
    x.lists.emplace_back();
    x.free_lists.push_back(int32_t(x.lists.size()));
  }
  const int32_t index = x.free_lists.back();
  x.free_lists.pop_back();
  return index;
}
void forget_list(Extras& x, Cell& cell) {
  list_of(x, cell).clear();
  x.free_lists.push_back(cell.many);
  cell.many = 0;
}
void forget_readers(Extras& x, Cell& cell) {
  cell.readers[0].block = cell.readers[1].block = 0;
  if (cell.many) forget_list(x, cell);
}
// Several blocks of one launch, the newest of which stands in `time`.
constexpr uint32_t kSeveralBlocks = ~0u;

bool of_earlier_launch(const Current& a, uint32_t block) {
  return block < a.b->launch->first_serial;
}

Conflict check_group(const Current& a, const Readers& r) {
  if (!r.block || (r.strong && a.strong)) return {};
  const char* const kind = r.writes ? "write" : "read";
  if (!r.writes && !a.writes) return {};
  if (r.block == kSeveralBlocks) {  // only an exact answer may be a finding
    if (of_earlier_launch(a, r.time) || knows_foreign(a.t)) return {};
    return {kind, 0, 0, r.site};
  }
  if (r.block == a.b->serial ? r.time <= a.b->floor : a.is_shared || of_earlier_launch(a, r.block))
    return {};
  for (uint32_t lanes = r.lanes; lanes; lanes &= lanes - 1) {
    const uint32_t thread = r.warp * 32u + uint32_t(__builtin_ctz(lanes));
    if (!ordered(a, r.block, thread, r.time)) return {kind, r.block, thread, r.site};
  }
  return {};
}
Conflict check_readers(Extras& x, const Cell& cell, const Current& a) {
  for (const Readers& r : cell.readers)
    if (const Conflict c = check_group(a, r); c.kind) return c;
  if (cell.many)
    for (const Readers& r : list_of(x, cell))
      if (const Conflict c = check_group(a, r); c.kind) return c;
  return {};
}

// Whether these reads need not be remembered once the current thread has read: they happened before
// it, or to it.
bool superseded(const Current& a, const Readers& r) {
  if (r.block == a.b->serial)
    return r.time <= a.b->floor || (r.warp == a.t->warp && r.lanes == 1u << a.t->lane &&
                                    r.strong == a.strong && r.writes <= a.writes);
  return a.is_shared || of_earlier_launch(a, r.block == kSeveralBlocks ? r.time : r.block);
}
bool joins(const Current& a, Readers& r) {
  if (r.block != a.b->serial || r.time != a.t->now || r.warp != a.t->warp || r.strong != a.strong ||
      r.writes != a.writes)
    return false;
  r.lanes |= 1u << a.t->lane;
  return true;
}
void add_reader(Extras& x, Cell& cell, const Current& a) {
  for (Readers& r : cell.readers)
    if (joins(a, r)) return;
  const Readers me{a.b->serial,         a.t->now, 1u << a.t->lane, a.site,
                   uint16_t(a.t->warp), a.strong, a.writes};
  for (Readers& r : cell.readers)
    if (!r.block || superseded(a, r)) {
      r = me;
      return;
    }
  if (cell.readers[0].block != a.b->serial && cell.readers[1].block != a.b->serial) {
    // A third block reads this word, as blocks do with weights: remember that, not each of them.
    const Readers &first = cell.readers[0], &second = cell.readers[1];
    cell.readers[1] = {kSeveralBlocks,
                       a.b->serial,
                       0,
                       second.site,
                       0,
                       first.strong && second.strong,
                       first.writes || second.writes};
    cell.readers[0] = me;
    if (cell.many) forget_list(x, cell);
    return;
  }
  if (!cell.many) cell.many = new_list(x);
  std::vector<Readers>& list = list_of(x, cell);
  for (Readers& r : list)
    if (joins(a, r)) return;
  list.erase(
      std::remove_if(list.begin(), list.end(), [&](const Readers& r) { return superseded(a, r); }),
      list.end());
  list.push_back(me);
}

// Looks for a conflict; without one, remembers the access.
Conflict check_cell(Extras& x, Cell& cell, const Current& a) {
  const Stamp& w = cell.write;
  if (w.block) {
    const bool pending = w.pending && w.block == a.b->serial;
    if (pending || !ordered(a, w)) return {"write", w.block, w.thread, w.site, pending};
  }
  if (a.writes || w.atomics)
    if (const Conflict c = check_readers(x, cell, a); c.kind) return c;
  if (a.writes && !a.strong) {
    forget_readers(x, cell);
    cell.write = {a.b->serial, a.t->now, a.site, uint16_t(a.t->index), a.pending};
  } else {
    add_reader(x, cell, a);
    if (a.writes) cell.write.atomics = true;
  }
  return {};
}
Cell* byte_cells(Extras& x, Cell& word) {
  if (!word.split) {
    if (x.free_bytes.empty()) {
      x.bytes.resize(x.bytes.size() + 4);
      x.free_bytes.push_back(int32_t(x.bytes.size() / 4));
    }
    word.split = x.free_bytes.back();
    x.free_bytes.pop_back();
    for (int i = 0; i < 4; i++) {
      Cell& byte = x.bytes[size_t(word.split - 1) * 4 + size_t(i)];
      byte = Cell{word.write, {word.readers[0], word.readers[1]}, 0, 0};
      if (word.many) {
        byte.many = new_list(x);
        list_of(x, byte) = list_of(x, word);
      }
    }
    forget_readers(x, word);
  }
  return &x.bytes[size_t(word.split - 1) * 4];
}
void join_bytes(Extras& x, Cell& word) {
  Cell* bytes = byte_cells(x, word);
  const Stamp stamp = bytes[0].write;
  for (int i = 0; i < 4; i++) forget_readers(x, bytes[i]);
  x.free_bytes.push_back(word.split);
  word = Cell{stamp, {}, 0, 0};
}

// The words, or the bytes of one word, that the access touches. Leaves a.offset at a conflict.
Conflict check_cells(Shadow& s, Extras& x, Current& a, uint32_t size) {
  const uint64_t begin = a.offset, end = begin + size;
  if (size < 4) {
    Cell* bytes = byte_cells(x, s.cells[begin / 4]);
    for (uint32_t i = 0; i < size; i++)
      if (const Conflict c = check_cell(x, bytes[begin % 4 + i], a); c.kind) return c;
    return {};
  }
  for (a.offset = begin / 4 * 4; a.offset + 4 <= end; a.offset += 4) {
    Cell& word = s.cells[a.offset / 4];
    if (__builtin_expect(!word.split, 1)) {
      if (const Conflict c = check_cell(x, word, a); c.kind) return c;
      continue;
    }
    for (int i = 0; i < 4; i++)
      if (const Conflict c = check_cell(x, byte_cells(x, word)[i], a); c.kind) return c;
    if (a.writes && !a.strong) join_bytes(x, word);  // the word is one again
  }
  return {};
}

}  // namespace

void check_access(Thread* t, Shadow& s, uint64_t offset, uint32_t size, int site, bool reads,
                  bool writes, bool strong, bool pending, bool is_shared) {
  Current a{t, t->block, site, reads, writes, strong, pending, is_shared, offset};
  Extras& x = s.parts[is_shared ? 0 : offset / 256 % Shadow::kParts];
  Conflict conflict;
  {
    std::unique_lock<std::mutex> lock(x.mutex, std::defer_lock);
    if (!is_shared) lock.lock();
    conflict = check_cells(s, x, a, size);
  }
  // A finding leaves this fiber for good, without unwinding it: a lock would never be released, and
  // the worker of another block would wait for it.
  if (conflict.kind) race(a, conflict);
}

void settle_async(Thread* t, uint8_t* to, uint32_t size, int site) {
  const Settings& settings_ = settings();
  const uint64_t offset = uint64_t(to - t->shared);
  Shadow& s = t->block->worker->shared_shadow;
  if (settings_.races) {
    const Stamp stamp{t->block->serial, t->now, site, uint16_t(t->index), false};
    for (uint64_t w = offset / 4; w < (offset + size) / 4; w++) s.cells[w].write = stamp;
  }
}

// ---- every access, when something watches ----

namespace {

struct Kind {
  bool reads, writes, strong, release;
};
Kind kind_of(Access access) {
  switch (access) {
    case kLoad:
    case kMatrixRead:
      return {true, false, false, false};
    case kStore:
    case kMatrixWrite:
    case kAsyncStore:
      return {false, true, false, false};
    case kStrongLoad:
      return {true, false, true, false};
    case kStoreRelaxed:
      return {false, true, true, false};
    case kStoreRelease:
      return {false, true, true, true};
    case kAtomicRelaxed:
      return {true, true, true, false};
    default:
      return {true, true, true, true};
  }
}
// Flags are 0 or 1, a byte each.
bool all_set(const uint8_t* flags, uint32_t size) {
  if (size == 4) return load<uint32_t>(flags) == 0x01010101u;
  for (uint32_t i = 0; i < size; i++)
    if (!flags[i]) return false;
  return true;
}

}  // namespace

// CUB's raking scans and reductions pad their grid of partial results and carry the padding along
// without using it.
static bool reads_padding(const Thread* t, int site) {
  static const char* const kFiles[] = {
      "/cub/block/specializations/block_scan_raking.cuh:",
      "/cub/block/specializations/block_reduce_raking.cuh:",
      "/cub/block/specializations/block_reduce_raking_commutative_only.cuh:"};
  const char* where = t->block->launch->kernel->sites[site].where;
  const char* caller = std::strstr(where, " < ");
  const std::string innermost(where, caller ? size_t(caller - where) : std::strlen(where));
  for (const char* file : kFiles)
    if (innermost.find(file) != std::string::npos) return true;
  return false;
}

static void watch_shared(Thread* t, int site, uint32_t offset, uint32_t size, Access access) {
  const Settings& s = settings();
  Worker* w = t->block->worker;
  const Kind kind = kind_of(access);
  if (s.initialised) {
    uint8_t* flags = w->shared_initialised.data() + offset;
    if (kind.reads && !all_set(flags, size) && !reads_padding(t, site))
      fault(t, site, kUninitialised,
            "read of %u bytes of shared memory at offset 0x%x that nothing wrote", size, offset);
    if (kind.writes) std::memset(flags, 1, size);
  }
  if (s.races) {
    check_access(t, w->shared_shadow, offset, size, site, kind.reads, kind.writes, kind.strong,
                 access == kAsyncStore, true);
    if (kind.strong)
      acquire_and_release(t, reinterpret_cast<uint64_t>(t->shared) + offset, kind.reads,
                          kind.writes, kind.reads && kind.writes, kind.release);
  }
  if (s.count && access != kMatrixRead && access != kMatrixWrite)
    log_access(t, site,
               access == kAsyncStore       ? kAsyncToShared
               : kind.reads && kind.writes ? kAtomicShared
               : kind.writes               ? kToShared
                                           : kFromShared,
               offset, size);
}

bool on_own_stack(const Thread* t, uint64_t address) {
  return address - reinterpret_cast<uint64_t>(t->stack_low) <
         uint64_t(t->stack_high - t->stack_low);
}

static void watch_global(Thread* t, int site, uint64_t address, uint32_t size, Access access,
                         Traffic traffic) {
  const Settings& s = settings();
  Block* b = t->block;
  const Kind kind = kind_of(access);
  Allocation* a = find_cached(b->worker, address, size);
  if (!a) {
    // A kernel parameter whose address was taken lies in the launch's own copy.
    const uint64_t parameters = reinterpret_cast<uint64_t>(b->launch->parameters);
    if (!kind.writes && address - parameters < b->launch->kernel->parameter_bytes) return;
    if (!s.bounds) return;
    // Name what lies nearest: an allocation before or after the address, or the block's shared
    // memory.
    Allocation* near = find_allocation(address);
    uint64_t distance = near ? 0 : ~0ull;
    if (!near) {
      const auto at = position(address);
      if (at != allocations().begin()) {
        Allocation* before = *std::prev(at);
        distance = address - (before->address + before->size);
        if (distance < kGap) near = before;
      }
      if (at != allocations().end() &&
          (*at)->address - address < std::min<uint64_t>(distance, 4096)) {
        near = *at;
        distance = near->address - address;
      }
    }
    const uint64_t beyond = address - (reinterpret_cast<uint64_t>(t->shared) + t->shared_size);
    if (t->shared_size && beyond < std::min<uint64_t>(distance, 64 << 10))
      bad_shared_access(t, site, t->shared_size + beyond, size);
    const char* what = kind.writes ? "write" : "read";
    if (near)
      fault(t, site, kOutside, "%s of %u bytes at offset %ld of an allocation of %zu bytes%s%s",
            what, size, long(address - near->address), near->size, near->name ? ": " : "",
            near->name ? near->name : "");
    fault(t, site, kOutside, "%s of %u bytes at 0x%lx, which is in no allocation of the device",
          what, size, (unsigned long)address);
  }
  const uint64_t offset = address - a->address;
  if (kind.writes && a->read_only && s.bounds)
    fault(t, site, kOutside, "write to %s, which is __constant__",
          a->name ? a->name : "read-only memory");
  if (s.initialised && a->initialised) {
    if (kind.reads && !all_set(a->initialised + offset, size))
      fault(t, site, kUninitialised,
            "read of %u bytes of global memory at offset 0x%lx of an allocation of %zu bytes that "
            "nothing wrote",
            size, (unsigned long)offset, a->size);
    if (kind.writes) std::memset(a->initialised + offset, 1, size);
  }
  if (s.races && !a->read_only) {
    if (kind.strong) acquire_and_release(t, address, kind.reads, false, false, false);
    const uint64_t skew = a->address % 4;  // words of the address space, not of the allocation
    check_access(t, a->shadow, offset + skew, size, site, kind.reads, kind.writes, kind.strong,
                 false, false);
    if (kind.strong && kind.writes)
      acquire_and_release(t, address, false, true, kind.reads, kind.release);
  }
  if (s.count) {
    auto& sectors = kind.writes ? a->sectors_written : a->sectors_read;
    const uint64_t first = address / 32 - a->address / 32,
                   last = (address + size - 1) / 32 - a->address / 32;
    for (uint64_t i = first; i <= last && i < sectors.size(); i++) sectors[i] = 1;
    log_access(t, site, traffic, address, size);
  }
}

static void watch_generic(Thread* t, int site, uint64_t address, uint32_t size, Access access) {
  const uint64_t shared = reinterpret_cast<uint64_t>(t->shared);
  if (address - shared < t->shared_size) {
    if (address - shared + size > t->shared_size)
      bad_shared_access(t, site, address - shared, size);
    return watch_shared(t, site, uint32_t(address - shared), size, access);
  }
  if (on_own_stack(t, address)) return;
  const Kind kind = kind_of(access);
  watch_global(t, site, address, size, access,
               kind.reads && kind.writes ? kAtomicGlobal
               : kind.writes             ? kToGlobal
                                         : kFromGlobal);
}

void check_shared(Thread* t, int site, uint32_t offset, uint32_t size, Access access) {
  if (uint64_t(offset) + size > t->shared_size) bad_shared_access(t, site, offset, size);
  if (offset & (size - 1)) misaligned_access(t, site, offset, size, true);
  if (watching) watch_shared(t, site, offset, size, access);
}

void check_generic(Thread* t, int site, uint64_t address, uint32_t size, Access access) {
  if (address & (size - 1)) misaligned_access(t, site, address, size, false);
  if (watching) watch_generic(t, site, address, size, access);
}

// ---- cp.async ----

static void land(AsyncCopy& copy) {
  if (copy.landed) return;
  std::memcpy(copy.to, copy.from, copy.valid);
  std::memset(copy.to + copy.valid, 0, copy.size - copy.valid);
  copy.landed = true;
}
void async_copy(Thread* t, int site, uint8_t* to, uint64_t from, uint32_t size, uint32_t valid) {
  valid = std::min(size, valid);
  if (from & (size - 1)) misaligned_access(t, site, from, size, false);
  if (watching && valid) watch_global(t, site, from, valid, kLoad, kAsyncFromGlobal);
  if (t->copy_count == t->copy_capacity) {
    t->copy_capacity = t->copy_capacity ? 2 * t->copy_capacity : 16;
    t->copies = static_cast<AsyncCopy*>(
        std::realloc(t->copies, sizeof(AsyncCopy) * size_t(t->copy_capacity)));
  }
  AsyncCopy& copy = t->copies[t->copy_count++];
  copy = {to, reinterpret_cast<const uint8_t*>(from), size, valid, t->copy_group, site, false};
  const Settings& s = settings();
  if (s.landing == Settings::kEarly || (s.landing == Settings::kMixed && next_random(t->block) % 2))
    land(copy);
}
void async_commit(Thread* t) { t->copy_group++; }
void async_wait(Thread* t, int pending) {
  int kept = 0;
  for (int i = 0; i < t->copy_count; i++) {
    AsyncCopy& copy = t->copies[i];
    if (pending >= 0 && int64_t(copy.group) >= int64_t(t->copy_group) - pending) {
      t->copies[kept++] = copy;
      continue;
    }
    land(copy);
    if (watching) settle_async(t, copy.to, copy.size, copy.site);
  }
  t->copy_count = kept;
}
void memory_fence(Thread* t) {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  if (settings().races && watching) fence(t);
}

}  // namespace ptx
