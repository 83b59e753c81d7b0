// SPDX-License-Identifier: Apache-2.0
// What a finding says: the kernel, the thread, the PTX line, the source line, and the command that
// shows it again.
#include <cuda_runtime_api.h>
#include <cxxabi.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>

#include "state.h"

extern char** environ;

namespace ptx {

static std::mutex report_mutex;
static std::string* last = new std::string;

static const char* title(Finding f) {
  switch (f) {
    case kOutside:
      return "access outside memory";
    case kMisaligned:
      return "misaligned access";
    case kRace:
      return "data race";
    case kUninitialised:
      return "read of uninitialised memory";
    case kDivergent:
      return "divergent barrier";
    case kDeadlock:
      return "deadlock";
    case kAssertion:
      return "assertion failed";
    case kTrapped:
      return "trap";
    default:
      return "unsupported instruction";
  }
}
static int error_of(Finding f) {
  switch (f) {
    case kOutside:
      return cudaErrorIllegalAddress;
    case kMisaligned:
      return cudaErrorMisalignedAddress;
    case kAssertion:
      return cudaErrorAssert;
    case kDeadlock:
      return cudaErrorLaunchTimeout;
    case kUnsupportedCode:
      return cudaErrorIllegalInstruction;
    default:
      return cudaErrorLaunchFailure;
  }
}
static std::string demangle(const char* name) {
  int status = 0;
  char* text = abi::__cxa_demangle(name, nullptr, nullptr, &status);
  std::string result = status == 0 ? text : name;
  std::free(text);
  return result;
}
static std::string extent(const uint32_t* v) {
  return "(" + std::to_string(v[0]) + "," + std::to_string(v[1]) + "," + std::to_string(v[2]) + ")";
}
static std::string quoted(const std::string& word) {
  if (!word.empty() &&
      word.find_first_not_of(
          "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./:=,+") ==
          std::string::npos)
    return word;
  std::string out = "'";
  for (char c : word) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}
static std::string reproduce() {
  std::string command =
      "PTX_EMULATOR_THREADS=1 PTX_EMULATOR_SEED=" + std::to_string(settings().seed);
  for (char** e = environ; *e; e++) {
    const std::string entry = *e;
    if (entry.rfind("PTX_EMULATOR_", 0) || !entry.rfind("PTX_EMULATOR_THREADS=", 0) ||
        !entry.rfind("PTX_EMULATOR_SEED=", 0))
      continue;
    command += " " + quoted(entry);
  }
  std::ifstream self("/proc/self/cmdline", std::ios::binary);
  std::string words;
  for (std::string word; std::getline(self, word, '\0');) words += " " + quoted(word);
  const char* test = std::getenv("PYTEST_CURRENT_TEST");
  bool inside = false;
  for (const char* part : {"pytest", "exec(eval(sys.stdin.readline()))"})  // or a worker of xdist
    inside |= words.find(part) != std::string::npos;
  if (!test || !inside) return command + words;
  const std::string name = test;  // inside pytest itself
  return command + " python -m pytest " + quoted(name.substr(0, name.rfind(" (")));
}

std::string describe_site(const Launch& launch, int site) {
  const Site& s = launch.kernel->sites[site];
  std::string text = "PTX line " + std::to_string(s.line) + ": " + s.text;
  return *s.where ? text + "\n           " + s.where : text;
}
std::string describe_thread(const Block& b, uint32_t index) {
  return index < b.threads ? "thread " + extent(b.thread[index]->tid)
                           : "thread " + std::to_string(index);
}

static void finish(const std::string& text, Launch* launch, int error) {
  std::lock_guard<std::mutex> lock(report_mutex);
  if (launch && launch->failed.exchange(true)) return;  // the first finding stands
  if (launch) launch->error = error;
  *last = text;
  std::fflush(stdout);
  std::fprintf(stderr, "%s", text.c_str());
  std::fflush(stderr);
  if (!settings().return_errors) _exit(86);
}
const char* last_report() { return last->c_str(); }
void clear_report() { last->clear(); }

void fault(Thread* t, int site, Finding finding, const char* format, ...) {
  Block* b = t->block;
  char what[2048];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(what, sizeof what, format, arguments);
  va_end(arguments);
  std::ostringstream out;
  out << "ptx_emulator: " << title(finding) << "\n  what     " << what << "\n  kernel   "
      << demangle(b->launch->kernel->name) << "\n  thread   " << extent(t->tid) << " of "
      << extent(t->ntid) << ", block " << extent(t->ctaid) << " of " << extent(t->nctaid);
  if (site >= 0) out << "\n  at       " << describe_site(*b->launch, site);
  out << "\n  again    " << reproduce() << "\n";
  finish(out.str(), b->launch, error_of(finding));
  // The launch has failed: leave the block where it stands. Its threads never run again.
  b->abandoned = true;
  leave_block(b);
  __builtin_unreachable();
}

void report_deadlock(Block* b) {
  std::ostringstream out;
  Thread* any = nullptr;
  std::map<std::pair<int, int>, std::pair<int, Thread*>> groups;
  for (Thread* t : b->thread)
    if (t->state != kDone) {
      auto& g = groups[{t->state, t->site}];
      g.first++;
      if (!g.second) g.second = t;
      any = t;
    }
  out << "ptx_emulator: " << title(kDeadlock) << "\n  what     " << b->live << " of " << b->threads
      << " threads never finish\n  kernel   " << demangle(b->launch->kernel->name)
      << "\n  block    " << extent(any->ctaid) << " of " << extent(any->nctaid);
  for (auto& g : groups)
    out << "\n  waiting  " << g.second.first << " threads, " << extent(g.second.second->tid)
        << " first, for "
        << (g.first.first == kAtBarrier ? "a block barrier" : "other lanes of their warp") << " at "
        << describe_site(*b->launch, g.first.second);
  out << "\n  again    " << reproduce() << "\n";
  finish(out.str(), b->launch, error_of(kDeadlock));
}

void report_host(const char* format, ...) {
  char what[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(what, sizeof what, format, arguments);
  va_end(arguments);
  std::lock_guard<std::mutex> lock(report_mutex);
  *last = std::string("ptx_emulator: ") + what + "\n";
  std::fprintf(stderr, "%s", last->c_str());
}

void bad_shared_access(Thread* t, int site, uint64_t offset, uint32_t size) {
  fault(t, site, kOutside, "%u bytes of shared memory at offset 0x%lx; the block has %u bytes",
        size, (unsigned long)offset, t->shared_size);
}
void bad_local_access(Thread* t, int site, uint64_t offset, uint32_t size, uint32_t bytes) {
  fault(t, site, kOutside, "%u bytes at offset %ld of the function's local arrays of %u bytes",
        size, long(offset), bytes);
}
void misaligned_access(Thread* t, int site, uint64_t address, uint32_t size, bool shared) {
  fault(t, site, kMisaligned, "an access of %u bytes at %s 0x%lx must be aligned to %u", size,
        shared ? "shared offset" : "address", (unsigned long)address, size);
}
void unsupported(Thread* t, int site) {
  fault(t, site, kUnsupportedCode,
        "the emulator does not know this instruction, or this form of it");
}
void trap(Thread* t, int site) { fault(t, site, kTrapped, "the kernel stopped itself"); }
void device_assert(Thread* t, const char* message, const char* file, uint32_t line,
                   const char* function) {
  fault(t, -1, kAssertion, "%s:%u: %s: `%s'", file, line, function, message);
}

int device_printf(const char* format, const uint8_t* arguments) {
  int count = 0;
  size_t offset = 0;
  std::string out;
  auto next = [&](size_t size) {
    offset = (offset + size - 1) / size * size;
    const uint8_t* p = arguments + offset;
    offset += size;
    return p;
  };
  while (*format) {
    if (*format != '%') {
      out += *format++;
      continue;
    }
    if (format[1] == '%') {
      out += '%';
      format += 2;
      continue;
    }
    std::string piece;
    bool wide = false;
    while (*format) {
      const char c = *format++;
      wide |= c == 'l' || c == 'z' || c == 'j';
      if (c == '*') {
        piece += std::to_string(load<int32_t>(next(4)));
        continue;
      }
      piece += c;
      if (std::strchr("diouxXcpsfFeEgGaA", c)) break;
    }
    char text[512];
    const char kind = piece.back();
    count++;
    if (std::strchr("fFeEgGaA", kind))
      std::snprintf(text, sizeof text, piece.c_str(), load<double>(next(8)));
    else if (kind == 's' || kind == 'p' || wide)
      std::snprintf(text, sizeof text, piece.c_str(), load<uint64_t>(next(8)));
    else
      std::snprintf(text, sizeof text, piece.c_str(), load<uint32_t>(next(4)));
    out += text;
  }
  std::fputs(out.c_str(), stdout);
  return count;
}

}  // namespace ptx
