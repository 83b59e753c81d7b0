// SPDX-License-Identifier: Apache-2.0
// The tensor-core forward for bf16, K = V = 128, as scripts/cuda_counts.py asks for it:
//
//   forward_counts launches T HK HV PROCESSORS PACKED
//       the launches of a call on a device with so many multiprocessors: a line each, of kernel,
//       blocks, threads, bytes of dynamic shared memory. Nothing runs. Then the plan of the call:
//       "plan", warps, chunks in a segment, segments, whether warps have roles.
//   forward_counts run T HK HV PROCESSORS FAST WARPS SEGMENT_CHUNKS ROLES
//       runs it, for count mode.
#define DELTANET_FAST
#include "bf16_128.cuh"
#include "processors.cuh"
#include "testing.cuh"
using namespace testing;
using deltanet::DType;
namespace dn = deltanet::cuda;
namespace tc = deltanet::cuda::tensor_core;

constexpr int K = 128, V = 128;
static bool dry = false;  // launches are listed, not run

cudaError_t own_launch(cudaKernel_t, dim3, dim3, void**, size_t,
                       cudaStream_t) __asm__("__cudaLaunchKernel");

static const char* name_of(cudaKernel_t kernel) {
  const auto is = [&](auto* function) {
    cudaKernel_t known = nullptr;
    cudaGetKernel(&known, reinterpret_cast<const void*>(function));
    return known == kernel;
  };
  if (is(tc::prepare_kernel<tc::PrepareTraits<dn::bf16, K>>)) return "prepare";
  if (is(tc::scan_output_kernel<tc::ScanTraits<dn::bf16, K, tc::Precision::kExact>>))
    return "scan_output";
  if (is(tc::scan_roles_kernel<tc::ScanTraits<dn::bf16, K, tc::Precision::kExact, true>>))
    return "scan_roles";
  if (is(tc::scan_segments_kernel<tc::SegmentsTraits<8>>)) return "scan_segments<8>";
  if (is(tc::scan_segments_kernel<tc::SegmentsTraits<16>>)) return "scan_segments<16>";
  return "chunk_table";
}

cudaError_t own_launch(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared,
                       cudaStream_t stream) {
  if (!dry)
    return emulated<decltype(own_launch)>("__cudaLaunchKernel")(kernel, grid, block, arguments,
                                                                shared, stream);
  std::printf("%s %u %u %zu\n", name_of(kernel), grid.x, block.x, shared);
  return cudaSuccess;
}

struct Call {
  dn::RuleParams p;

  Call(int64_t T, int64_t HK, int64_t HV) {
    p.batch = p.sequences = 1;
    p.tokens = T;
    p.key_heads = HK;
    p.value_heads = HV;
    p.dim_k = K;
    p.dim_v = V;
    p.query = p.key = {nullptr, DType::kBFloat16, {T * HK * K, HK * K, K, 1}};
    p.value = {nullptr, DType::kBFloat16, {T * HV * V, HV * V, V, 1}};
    p.output = {nullptr, DType::kBFloat16, {T * HV * V, HV * V, V, 1}};
    p.g = p.beta = {nullptr, DType::kFloat32, {T * HV, HV, 1}};
    p.scale = 0.088388;
    p.l2norm = true;
  }
};

int list_launches(Call call, bool packed) {
  dry = true;
  // Never read: nothing runs.
  alignas(256) static char nothing[256];
  dn::RuleParams& p = call.p;
  p.query.data = p.key.data = p.value.data = p.g.data = p.beta.data = p.output.data = nothing;
  if (packed) p.device_cu_seqlens = nothing;
  tc::forward(p, nothing, nullptr);
  const tc::Plan plan(p, {}, tc::kernels_of(p, tc::Precision::kExact), tc::current_device());
  std::printf("plan %d %lld %lld %d\n", plan.warps, static_cast<long long>(plan.segment_chunks),
              static_cast<long long>(plan.segments), int(plan.roles));
  return 0;
}

int run(Call call, bool fast, int warps, int64_t segment_chunks, bool roles) {
  const auto narrow = [](const std::vector<float>& x) {
    std::vector<dn::bf16> y(x.size());
    for (size_t i = 0; i < x.size(); ++i) y[i] = __float2bfloat16(x[i]);
    return y;
  };
  dn::RuleParams& p = call.p;
  const size_t T = size_t(p.tokens), HK = size_t(p.key_heads), HV = size_t(p.value_heads);
  std::vector<float> log_decay = numbers(T * HV, 4), strength = numbers(T * HV, 5);
  for (float& x : log_decay) x = -0.1f * std::fabs(x);
  for (float& x : strength) x = std::fabs(x);
  const Array<dn::bf16> q(narrow(numbers(T * HK * K, 1))), k(narrow(numbers(T * HK * K, 2)));
  const Array<dn::bf16> v(narrow(numbers(T * HV * V, 3)));
  const Array<float> g(log_decay), beta(strength);
  const Array<dn::bf16> out(std::vector<dn::bf16>(T * HV * V, __float2bfloat16(NAN)));
  p.query.data = q.data;
  p.key.data = k.data;
  p.value.data = v.data;
  p.g.data = g.data;
  p.beta.data = beta.data;
  p.output.data = out.data;
  tc::Options options;
  options.precision = fast ? tc::Precision::kFast : tc::Precision::kExact;
  options.warps = warps;
  options.segment_chunks = segment_chunks;
  options.roles = roles ? tc::Roles::kAlways : tc::Roles::kNever;
  const Array<char> workspace(tc::workspace_bytes(p, options));
  tc::forward(p, workspace.data, nullptr, options);
  bool finite = true;
  for (dn::bf16 y : out.host()) finite = finite && std::isfinite(__bfloat162float(y));
  report("every output is written, and finite", finite);
  return finish();
}

int main(int count, char** argument) {
  const auto number = [&](int i) { return i < count ? std::atoll(argument[i]) : 0; };
  const std::string mode = count > 1 ? argument[1] : "";
  const Call call(number(2), number(3), number(4));
  processors = int(number(5));
  if (mode == "launches" && count == 7) return list_launches(call, number(6));
  if (mode == "run" && count == 10)
    return run(call, number(6), int(number(7)), number(8), number(9));
  std::fprintf(stderr, "forward_counts: see the comment in forward_counts.cu\n");
  return 2;
}
