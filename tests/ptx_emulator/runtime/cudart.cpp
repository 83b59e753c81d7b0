// SPDX-License-Identifier: Apache-2.0
// The stand-in CUDA runtime: device memory is host memory, a stream runs what it is given at once,
// and a capturing stream records it. What would break the capture of a CUDA graph is refused with
// the error that the real runtime gives.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "modules.h"
#include "state.h"

using namespace ptx;

// ---- graphs ----

struct RecordedLaunch {
  RegisteredKernel* kernel;
  dim3 grid, block;
  size_t dynamic_shared;
  std::vector<uint8_t> parameters;
};
struct Operation {
  enum Kind { kLaunch, kCopy, kSet, kFresh } kind;
  RecordedLaunch launch;
  void* to;
  const void* from;
  size_t bytes;
  int value;
};
struct CUgraph_st {
  std::vector<Operation> operations;
  std::vector<const void*> kept;  // memory of others that a replay comes back to
};
struct CUgraphExec_st {
  std::vector<Operation> operations;
};
struct CUstream_st {
  bool capturing = false, broken = false;
  CUgraph_st* graph = nullptr;
};
struct CUevent_st {
  CUstream_st* captured_in = nullptr;
};

namespace {

// Limits of one compute capability. Shared memory in KiB: most that a block may opt in to, and what
// an SM has.
struct Limits {
  int arch, opt_in, per_sm, threads_per_sm, blocks_per_sm;
};
const Limits kLimits[] = {
    {75, 64, 64, 1024, 16},    {80, 163, 164, 2048, 32},  {86, 99, 100, 1536, 16},
    {87, 163, 164, 1536, 16},  {89, 99, 100, 1536, 24},   {90, 227, 228, 2048, 32},
    {100, 227, 228, 2048, 32}, {103, 227, 228, 2048, 32}, {110, 227, 228, 1536, 24},
    {120, 99, 100, 1536, 24},  {121, 99, 100, 1536, 24}};
constexpr int kPlainShared = 48 << 10;

struct Registry {
  std::recursive_mutex mutex;
  std::map<const void*, RegisteredKernel> kernels;
  std::map<const void*, RegisteredVariable> variables;
  std::vector<Module*> modules;
  cudaError_t last = cudaSuccess;
  int newest_arch = 0;
  std::vector<CUstream_st*> capturing;
};
Registry& state() {
  static auto* s =
      new Registry;  // nvcc's registration runs before the static constructors of this library
  return *s;
}
struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
thread_local std::vector<Configuration> configurations;

cudaError_t result(cudaError_t e) {
  if (e) state().last = e;
  return e;
}
cudaError_t refuse(cudaError_t e, const char* format, const std::string& detail) {
  report_host(format, detail.c_str());
  return result(e);
}

const Limits& limits() {
  const int arch = settings().arch       ? settings().arch
                   : state().newest_arch ? state().newest_arch
                                         : 80;
  const Limits* best = &kLimits[0];
  for (const Limits& l : kLimits)
    if (l.arch <= arch) best = &l;
  return *best;
}
int compute_capability() {
  return settings().arch ? settings().arch : state().newest_arch ? state().newest_arch : 80;
}

// The default stream cannot be captured; other streams are theirs.
CUstream_st* capturing_stream(cudaStream_t s) {
  if (!s || s == cudaStreamPerThread || s == cudaStreamLegacy) return nullptr;
  return s->capturing ? s : nullptr;
}
// For calls that may not happen while any stream captures (global mode): the capture is broken, as
// on the real runtime.
cudaError_t forbidden_in_capture(const char* call,
                                 cudaError_t error = cudaErrorStreamCaptureUnsupported) {
  if (state().capturing.empty()) return cudaSuccess;
  for (CUstream_st* s : state().capturing) s->broken = true;
  return refuse(error, "%s while a stream is capturing: it would break the CUDA graph", call);
}
#define REFUSE_IN_CAPTURE(call) \
  if (cudaError_t e_ = forbidden_in_capture(call)) return e_

// A legacy default-stream operation during a capture would have to wait for the captured stream.
cudaError_t implicit_in_capture(cudaStream_t s, const char* call) {
  if (state().capturing.empty() || (s && s != cudaStreamLegacy)) return cudaSuccess;
  return forbidden_in_capture(call, cudaErrorStreamCaptureImplicit);
}

// ---- launches ----

RegisteredKernel* find_kernel(const void* function) {
  auto found = state().kernels.find(function);
  if (found != state().kernels.end()) return &found->second;
  for (auto& [key, k] : state().kernels)
    if (&k == function) return &k;
  return nullptr;
}

cudaError_t check_launch(const RegisteredKernel& k, const Kernel& kernel, dim3 grid, dim3 block,
                         size_t dynamic) {
  const std::string name = k.name;
  const uint64_t threads = uint64_t(block.x) * block.y * block.z;
  if (!threads || block.x > 1024 || block.y > 1024 || block.z > 64 || threads > 1024)
    return refuse(cudaErrorInvalidConfiguration, "%s",
                  "launch of " + name + " with blocks of " + std::to_string(block.x) + " x " +
                      std::to_string(block.y) + " x " + std::to_string(block.z) +
                      " threads; possible: 1 to 1024");
  if (threads > kernel.max_threads)
    return refuse(cudaErrorInvalidValue, "%s",
                  "launch of " + name + " with " + std::to_string(threads) +
                      " threads a block; its __launch_bounds__ allow " +
                      std::to_string(kernel.max_threads));
  if (!grid.x || !grid.y || !grid.z || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535)
    return refuse(cudaErrorInvalidConfiguration, "%s",
                  "launch of " + name + " with a grid of " + std::to_string(grid.x) + " x " +
                      std::to_string(grid.y) + " x " + std::to_string(grid.z) +
                      "; possible: 1 to 2147483647, 65535, 65535");
  const size_t opt_in = size_t(limits().opt_in) << 10, total = kernel.static_shared + dynamic;
  if (kernel.static_shared > size_t(kPlainShared))
    return refuse(cudaErrorInvalidValue, "%s",
                  name + " has " + std::to_string(kernel.static_shared) +
                      " bytes of static shared memory; at most 49152");
  if (total > opt_in)
    return refuse(cudaErrorInvalidValue, "%s",
                  "launch of " + name + " with " + std::to_string(total) +
                      " bytes of shared memory; sm_" + std::to_string(compute_capability()) +
                      " has " + std::to_string(opt_in) + " for a block");
  if (dynamic > size_t(k.max_dynamic_shared) ||
      (total > size_t(kPlainShared) && dynamic > 0 && k.max_dynamic_shared <= kPlainShared))
    return refuse(cudaErrorInvalidValue, "%s",
                  "launch of " + name + " with " + std::to_string(dynamic) +
                      " bytes of dynamic shared memory; cudaFuncSetAttribute has allowed " +
                      std::to_string(k.max_dynamic_shared));
  return cudaSuccess;
}

cudaError_t execute(RecordedLaunch& r) {
  const Kernel* kernel = kernel_of(*r.kernel);
  if (!kernel) return cudaErrorInvalidDeviceFunction;
  Launch launch;
  launch.kernel = kernel;
  launch.parameters = r.parameters.data();
  launch.grid = {r.grid.x, r.grid.y, r.grid.z};
  launch.block = {r.block.x, r.block.y, r.block.z};
  launch.dynamic_shared = uint32_t(r.dynamic_shared);
  return cudaError_t(run(launch));
}

cudaError_t launch(const void* function, dim3 grid, dim3 block, void** arguments, size_t dynamic,
                   cudaStream_t stream) {
  std::lock_guard<std::recursive_mutex> lock(state().mutex);
  RegisteredKernel* k = find_kernel(function);
  if (!k)
    return refuse(cudaErrorInvalidDeviceFunction, "launch of %s",
                  "a function that is not a kernel of this program");
  const Kernel* kernel = kernel_of(*k);
  if (!kernel) return result(cudaErrorInvalidDeviceFunction);
  if (cudaError_t e = check_launch(*k, *kernel, grid, block, dynamic)) return e;
  if (cudaError_t e = implicit_in_capture(stream, "a launch on the default stream")) return e;
  RecordedLaunch r{k, grid, block, dynamic, std::vector<uint8_t>(kernel->parameter_bytes + 16)};
  for (uint32_t i = 0; i < kernel->parameters; i++)
    std::memcpy(r.parameters.data() + kernel->offsets[i], arguments[i], kernel->sizes[i]);
  if (CUstream_st* s = capturing_stream(stream)) {
    s->graph->operations.push_back({Operation::kLaunch, std::move(r), nullptr, nullptr, 0, 0});
    return cudaSuccess;
  }
  return result(execute(r));
}

// ---- copies ----

void do_copy(void* to, const void* from, size_t bytes) {
  std::memmove(to, from, bytes);
  copy_flags(to, from, bytes);
}
void do_set(void* to, int value, size_t bytes) {
  std::memset(to, value, bytes);
  mark_written(to, bytes);
}
// Whether the device may touch so many bytes there.
cudaError_t check_range(const char* call, const void* p, size_t bytes) {
  const uint64_t address = reinterpret_cast<uint64_t>(p);
  const Allocation* a = find_allocation(address);
  if (!bytes || (a && address + bytes <= a->address + a->size)) return cudaSuccess;
  char what[160];
  std::snprintf(what, sizeof what, "%s of %zu bytes at %p, %s", call, bytes, p,
                a ? "past the end of the allocation" : "which is in no allocation");
  return refuse(cudaErrorInvalidValue, "%s", what);
}
bool is_device(const void* p) { return find_allocation(reinterpret_cast<uint64_t>(p)) != nullptr; }
cudaError_t check_copy(const char* call, const void* to, const void* from, size_t bytes,
                       cudaMemcpyKind kind) {
  const bool guess = kind == cudaMemcpyDefault;
  const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  if (to_device || (guess && is_device(to)))
    if (cudaError_t e = check_range(call, to, bytes)) return e;
  if (from_device || (guess && is_device(from))) return check_range(call, from, bytes);
  return cudaSuccess;
}

cudaError_t copy_async(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                       cudaStream_t stream) {
  std::lock_guard<std::recursive_mutex> lock(state().mutex);
  if (cudaError_t e = implicit_in_capture(stream, "cudaMemcpyAsync on the default stream"))
    return e;
  if (cudaError_t e = check_copy("cudaMemcpyAsync", to, from, bytes, kind)) return e;
  if (CUstream_st* s = capturing_stream(stream)) {
    const bool to_host =
        kind == cudaMemcpyDeviceToHost || (kind == cudaMemcpyDefault && !is_device(to));
    if (to_host) return forbidden_in_capture("a copy from the device to the host");
    s->graph->operations.push_back({Operation::kCopy, {}, to, from, bytes, 0});
    return cudaSuccess;
  }
  do_copy(to, from, bytes);
  return cudaSuccess;
}

cudaError_t replay(std::vector<Operation>& operations) {
  for (Operation& o : operations) {
    switch (o.kind) {
      case Operation::kLaunch:
        if (cudaError_t e = execute(o.launch)) return result(e);
        break;
      case Operation::kCopy:
        do_copy(o.to, o.from, o.bytes);
        break;
      case Operation::kSet:
        do_set(o.to, o.value, o.bytes);
        break;
      case Operation::kFresh:  // memory of the graph: whatever it held is gone
        std::memset(o.to, 0xff, o.bytes);
        mark_unwritten(o.to, o.bytes);
    }
  }
  return cudaSuccess;
}

const Variable* find_variable(const void* symbol) {
  auto found = state().variables.find(symbol);
  return found == state().variables.end() ? nullptr : variable_of(found->second);
}

}  // namespace

#define LOCKED std::lock_guard<std::recursive_mutex> lock_(state().mutex)

extern "C" {

// ---- what nvcc's host code calls ----

void** __cudaRegisterFatBinary(void* wrapper) {
  update_watching();
  struct Wrapper {
    int magic, version;
    const uint8_t* data;
    void* name;
  };
  Module* m = register_fat_binary(static_cast<Wrapper*>(wrapper)->data);
  state().newest_arch = std::max(state().newest_arch, m->arch);
  state().modules.push_back(m);
  return reinterpret_cast<void**>(m);
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(void** module, const char* host, char*, const char* name, int, uint3*,
                            uint3*, dim3*, dim3*, int*) {
  RegisteredKernel k;
  k.module = reinterpret_cast<Module*>(module);
  k.name = name;
  state().kernels[host] = k;
}
void __cudaRegisterVar(void** module, char* host, char*, const char* name, int, size_t, int, int) {
  state().variables[host] = {reinterpret_cast<Module*>(module), name};
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared,
                                     struct CUstream_st* stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  const Configuration c = configurations.back();
  configurations.pop_back();
  *grid = c.grid, *block = c.block, *shared = c.shared;
  *static_cast<cudaStream_t*>(stream) = c.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(find_kernel(function));
  return *kernel ? cudaSuccess : result(cudaErrorInvalidDeviceFunction);
}
cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 grid, dim3 block, void** arguments,
                               size_t shared, cudaStream_t stream) {
  return launch(k, grid, block, arguments, shared, stream);
}
cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments,
                             size_t shared, cudaStream_t stream) {
  return launch(function, grid, block, arguments, shared, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* function,
                                void** arguments) {
  for (unsigned i = 0; i < c->numAttrs; i++) {
    const auto& a = c->attrs[i];
    const bool cluster =
        a.id == cudaLaunchAttributeClusterDimension &&
        (a.val.clusterDim.x > 1 || a.val.clusterDim.y > 1 || a.val.clusterDim.z > 1);
    if (cluster || (a.id == cudaLaunchAttributeCooperative && a.val.cooperative))
      return refuse(cudaErrorNotSupported, "%s",
                    "launches with clusters or a grid-wide barrier are not emulated");
  }
  return launch(function, c->gridDim, c->blockDim, arguments, c->dynamicSmemBytes, c->stream);
}
cudaError_t cudaLaunchCooperativeKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
  return refuse(cudaErrorNotSupported, "%s", "launches with a grid-wide barrier are not emulated");
}
cudaError_t cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  return __cudaGetKernel(kernel, function);
}
cudaError_t cudaGetFuncBySymbol(cudaFunction_t* f, const void* function) {
  *f = reinterpret_cast<cudaFunction_t>(find_kernel(function));
  return *f ? cudaSuccess : result(cudaErrorInvalidDeviceFunction);
}

// ---- memory ----

cudaError_t cudaMalloc(void** p, size_t bytes) {
  LOCKED;
  REFUSE_IN_CAPTURE("cudaMalloc");
  *p = bytes ? allocate(bytes) : nullptr;
  return cudaSuccess;
}
cudaError_t cudaFree(void* p) {
  LOCKED;
  REFUSE_IN_CAPTURE("cudaFree");
  return !p || release(p)
             ? cudaSuccess
             : refuse(cudaErrorInvalidValue, "%s", "cudaFree of what cudaMalloc did not return");
}
cudaError_t cudaMallocAsync(void** p, size_t bytes, cudaStream_t stream) {
  LOCKED;
  if (cudaError_t e = implicit_in_capture(stream, "cudaMallocAsync on the default stream"))
    return e;
  *p = bytes ? allocate(bytes) : nullptr;
  if (CUstream_st* s = capturing_stream(stream))
    s->graph->operations.push_back({Operation::kFresh, {}, *p, nullptr, bytes, 0});
  return cudaSuccess;
}
cudaError_t cudaFreeAsync(void* p, cudaStream_t stream) {
  LOCKED;
  if (cudaError_t e = implicit_in_capture(stream, "cudaFreeAsync on the default stream")) return e;
  if (capturing_stream(stream)) return cudaSuccess;  // the graph keeps its memory
  return !p || release(p) ? cudaSuccess
                          : refuse(cudaErrorInvalidValue, "%s",
                                   "cudaFreeAsync of what cudaMallocAsync did not return");
}
cudaError_t cudaMallocManaged(void** p, size_t bytes, unsigned) { return cudaMalloc(p, bytes); }
cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) {
  LOCKED;
  REFUSE_IN_CAPTURE("cudaHostAlloc");
  *p = std::malloc(bytes);
  return cudaSuccess;
}
cudaError_t cudaMallocHost(void** p, size_t bytes) { return cudaHostAlloc(p, bytes, 0); }
cudaError_t cudaFreeHost(void* p) {
  std::free(p);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  LOCKED;
  REFUSE_IN_CAPTURE("cudaMemcpy");
  if (cudaError_t e = check_copy("cudaMemcpy", to, from, bytes, kind)) return e;
  do_copy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return copy_async(to, from, bytes, kind, stream);
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  LOCKED;
  REFUSE_IN_CAPTURE("cudaMemset");
  if (cudaError_t e = check_range("cudaMemset", to, bytes)) return e;
  do_set(to, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  LOCKED;
  if (cudaError_t e = implicit_in_capture(stream, "cudaMemsetAsync on the default stream"))
    return e;
  if (cudaError_t e = check_range("cudaMemsetAsync", to, bytes)) return e;
  if (CUstream_st* s = capturing_stream(stream))
    s->graph->operations.push_back({Operation::kSet, {}, to, nullptr, bytes, value});
  else
    do_set(to, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyToSymbol(const void* symbol, const void* from, size_t bytes, size_t offset,
                               cudaMemcpyKind) {
  LOCKED;
  REFUSE_IN_CAPTURE("cudaMemcpyToSymbol");
  const Variable* v = find_variable(symbol);
  if (!v || offset + bytes > v->size) return result(cudaErrorInvalidSymbol);
  std::memcpy(static_cast<uint8_t*>(v->address) + offset, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyFromSymbol(void* to, const void* symbol, size_t bytes, size_t offset,
                                 cudaMemcpyKind) {
  LOCKED;
  REFUSE_IN_CAPTURE("cudaMemcpyFromSymbol");
  const Variable* v = find_variable(symbol);
  if (!v || offset + bytes > v->size) return result(cudaErrorInvalidSymbol);
  std::memcpy(to, static_cast<uint8_t*>(v->address) + offset, bytes);
  return cudaSuccess;
}
cudaError_t cudaGetSymbolAddress(void** p, const void* symbol) {
  LOCKED;
  const Variable* v = find_variable(symbol);
  *p = v ? v->address : nullptr;
  return v ? cudaSuccess : result(cudaErrorInvalidSymbol);
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  LOCKED;
  std::memset(a, 0, sizeof *a);
  a->type = is_device(p) ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
  a->devicePointer = a->hostPointer = const_cast<void*>(p);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = *total = size_t(16) << 30;
  return cudaSuccess;
}

// ---- errors, device ----

cudaError_t cudaGetLastError() {
  const cudaError_t e = state().last;
  state().last = cudaSuccess;
  return e;
}
cudaError_t cudaPeekAtLastError() { return state().last; }
const char* cudaGetErrorName(cudaError_t e) {
  static const std::map<int, const char*> names = {{0, "cudaSuccess"},
                                                   {1, "cudaErrorInvalidValue"},
                                                   {9, "cudaErrorInvalidConfiguration"},
                                                   {98, "cudaErrorInvalidDeviceFunction"},
                                                   {700, "cudaErrorIllegalAddress"},
                                                   {702, "cudaErrorLaunchTimeout"},
                                                   {710, "cudaErrorAssert"},
                                                   {715, "cudaErrorIllegalInstruction"},
                                                   {716, "cudaErrorMisalignedAddress"},
                                                   {719, "cudaErrorLaunchFailure"},
                                                   {801, "cudaErrorNotSupported"},
                                                   {900, "cudaErrorStreamCaptureUnsupported"},
                                                   {901, "cudaErrorStreamCaptureInvalidated"},
                                                   {906, "cudaErrorStreamCaptureImplicit"}};
  auto found = names.find(int(e));
  if (found != names.end()) return found->second;
  static thread_local char text[32];
  std::snprintf(text, sizeof text, "cudaError %d", int(e));
  return text;
}
const char* cudaGetErrorString(cudaError_t e) { return e ? cudaGetErrorName(e) : "no error"; }
cudaError_t cudaDeviceSynchronize() {
  LOCKED;
  REFUSE_IN_CAPTURE("cudaDeviceSynchronize");
  return state().last;
}
cudaError_t cudaGetDevice(int* d) {
  *d = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int d) { return d ? result(cudaErrorInvalidDevice) : cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* n) {
  *n = 1;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* v) {
  *v = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* v) {
  *v = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int) {
  const Limits& l = limits();
  switch (a) {
    case cudaDevAttrComputeCapabilityMajor:
      *v = compute_capability() / 10;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *v = compute_capability() % 10;
      break;
    case cudaDevAttrMultiProcessorCount:
      *v = 4;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *v = kPlainShared;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *v = l.opt_in << 10;
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *v = l.per_sm << 10;
      break;
    case cudaDevAttrReservedSharedMemoryPerBlock:
      *v = l.arch >= 80 ? 1024 : 0;
      break;
    case cudaDevAttrWarpSize:
      *v = 32;
      break;
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY:
      *v = 1024;
      break;
    case cudaDevAttrMaxBlockDimZ:
      *v = 64;
      break;
    case cudaDevAttrMaxGridDimX:
      *v = 0x7fffffff;
      break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
      *v = 65535;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *v = l.threads_per_sm;
      break;
    case cudaDevAttrMaxBlocksPerMultiprocessor:
      *v = l.blocks_per_sm;
      break;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor:
      *v = 65536;
      break;
    case cudaDevAttrMemoryPoolsSupported:
      *v = 1;
      break;
    default:
      *v = 0;
  }
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  std::memset(p, 0, sizeof *p);
  std::strcpy(p->name, "PTX emulator");
  p->major = compute_capability() / 10, p->minor = compute_capability() % 10;
  p->multiProcessorCount = 4, p->warpSize = 32, p->maxThreadsPerBlock = 1024;
  p->sharedMemPerBlock = size_t(kPlainShared), p->sharedMemPerBlockOptin = size_t(limits().opt_in)
                                                                           << 10;
  p->sharedMemPerMultiprocessor = size_t(limits().per_sm) << 10;
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void* function) {
  LOCKED;
  RegisteredKernel* k = find_kernel(function);
  const Kernel* kernel = k ? kernel_of(*k) : nullptr;
  if (!kernel) return result(cudaErrorInvalidDeviceFunction);
  std::memset(a, 0, sizeof *a);
  a->ptxVersion = a->binaryVersion = k->module->arch;
  a->maxThreadsPerBlock = int(kernel->max_threads);
  a->sharedSizeBytes = kernel->static_shared;
  a->localSizeBytes = kernel->local_bytes;
  a->numRegs = 32;
  a->maxDynamicSharedSizeBytes = k->max_dynamic_shared;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  LOCKED;
  RegisteredKernel* k = find_kernel(function);
  const Kernel* kernel = k ? kernel_of(*k) : nullptr;
  if (!kernel) return result(cudaErrorInvalidDeviceFunction);
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value < 0 || size_t(value) + kernel->static_shared > size_t(limits().opt_in) << 10)
    return refuse(cudaErrorInvalidValue, "%s",
                  "cudaFuncSetAttribute asks for " + std::to_string(value) +
                      " bytes of dynamic shared memory for " + k->name + "; sm_" +
                      std::to_string(compute_capability()) + " has " +
                      std::to_string(limits().opt_in << 10) + " for a block");
  k->max_dynamic_shared = value;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void* function,
                                                                   int threads, size_t dynamic,
                                                                   unsigned) {
  LOCKED;
  RegisteredKernel* k = find_kernel(function);
  const Kernel* kernel = k ? kernel_of(*k) : nullptr;
  if (!kernel || threads <= 0) return result(cudaErrorInvalidDeviceFunction);
  const size_t shared = kernel->static_shared + dynamic + 1024;
  *n = std::max(1, std::min({limits().blocks_per_sm, limits().threads_per_sm / threads,
                             int((size_t(limits().per_sm) << 10) / shared)}));
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void* function, int threads,
                                                          size_t dynamic) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(n, function, threads, dynamic, 0);
}

// ---- streams and events ----

cudaError_t cudaStreamCreate(cudaStream_t* s) {
  *s = new CUstream_st;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) { return cudaStreamCreate(s); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int) {
  return cudaStreamCreate(s);
}
cudaError_t cudaStreamDestroy(cudaStream_t s) {
  delete s;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) {
  LOCKED;
  REFUSE_IN_CAPTURE("cudaStreamSynchronize");
  return state().last;
}
cudaError_t cudaStreamQuery(cudaStream_t) {
  LOCKED;
  REFUSE_IN_CAPTURE("cudaStreamQuery");
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
  LOCKED;
  // A stream that waits for an event of the capture joins it.
  if (s && e && e->captured_in && !s->capturing) {
    s->capturing = true;
    s->graph = e->captured_in->graph;
  }
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* e) {
  *e = new CUevent_st;
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) { return cudaEventCreate(e); }
cudaError_t cudaEventDestroy(cudaEvent_t e) {
  delete e;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  LOCKED;
  if (cudaError_t error = implicit_in_capture(s, "cudaEventRecord on the default stream"))
    return error;
  e->captured_in = capturing_stream(s);
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) {
  LOCKED;
  REFUSE_IN_CAPTURE("cudaEventSynchronize");
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t) {
  LOCKED;
  REFUSE_IN_CAPTURE("cudaEventQuery");
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) {
  *ms = 0;
  return cudaSuccess;
}

// ---- capture ----

cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode) {
  LOCKED;
  if (!s || s == cudaStreamLegacy || s->capturing)
    return refuse(cudaErrorIllegalState, "%s", "this stream cannot begin a capture");
  s->capturing = true;
  s->broken = false;
  s->graph = new CUgraph_st;
  state().capturing.push_back(s);
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* graph) {
  LOCKED;
  auto& all = state().capturing;
  auto found = std::find(all.begin(), all.end(), s);
  if (found == all.end()) return result(cudaErrorIllegalState);
  all.erase(found);
  s->capturing = false;
  *graph = s->broken ? nullptr : s->graph;
  return s->broken ? result(cudaErrorStreamCaptureInvalidated) : cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus* status) {
  CUstream_st* c = capturing_stream(s);
  *status = !c          ? cudaStreamCaptureStatusNone
            : c->broken ? cudaStreamCaptureStatusInvalidated
                        : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  *mode = cudaStreamCaptureModeGlobal;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  *exec = new CUgraphExec_st{graph->operations};
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec, cudaGraph_t graph,
                                          unsigned long long flags) {
  return cudaGraphInstantiate(exec, graph, flags);
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  LOCKED;
  if (cudaError_t e = implicit_in_capture(stream, "cudaGraphLaunch on the default stream"))
    return e;
  return replay(exec->operations);
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* n) {
  *n = graph->operations.size();
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  delete exec;
  return cudaSuccess;
}

// ---- the emulator's own functions, for tests ----

// Lets kernels touch memory that this runtime did not allocate (a CPU tensor); `written` says
// whether its bytes hold values yet.
void ptx_emulator_expose(const void* pointer, size_t bytes, int written) {
  LOCKED;
  expose(pointer, bytes, written != 0);
}
void ptx_emulator_conceal(const void* pointer) {
  LOCKED;
  conceal(pointer);
}
const char* ptx_emulator_last_report() { return last_report(); }
void ptx_emulator_clear_report() { clear_report(); }
void ptx_emulator_set_seed(uint64_t seed) {
  settings().seed = seed;
  settings().landing = seed >= 2 ? Settings::kMixed : Settings::kLate;
}
void ptx_emulator_return_errors(int on) { settings().return_errors = on != 0; }
// The stream of the emulated operators: capturing between begin and end, so that the operators need
// not know.
static CUstream_st* own_stream() {
  static auto* s = new CUstream_st;
  return s;
}
void* ptx_emulator_stream() { return own_stream(); }
int ptx_emulator_capturing() { return own_stream()->capturing; }
int ptx_emulator_capture_begin() {
  return cudaStreamBeginCapture(own_stream(), cudaStreamCaptureModeGlobal);
}
int ptx_emulator_capture_end(void** graph) {
  return cudaStreamEndCapture(own_stream(), reinterpret_cast<cudaGraph_t*>(graph));
}
// Called instead of conceal while capturing: the memory stays exposed as long as the graph lives.
void ptx_emulator_keep(const void* pointer) {
  LOCKED;
  own_stream()->graph->kept.push_back(pointer);
}
void ptx_emulator_forget_graph(void* graph) {
  LOCKED;
  auto* g = static_cast<CUgraph_st*>(graph);
  for (const void* p : g->kept) conceal(p);
  delete g;
}
int ptx_emulator_replay(void* graph) {
  LOCKED;
  return replay(static_cast<CUgraph_st*>(graph)->operations);
}
}  // extern "C"
