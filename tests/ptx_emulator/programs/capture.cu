// SPDX-License-Identifier: Apache-2.0
// CUDA graph capture: what is recorded and replayed, and what is refused while a stream captures.
#include "testing.cuh"
using namespace testing;

__global__ void scale(const float* in, float* out, float factor, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = in[i] * factor;
}
__global__ void add(float* to, const float* what, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) to[i] += what[i];
}

static const int kN = 1000;
static bool all_are(const float* p, float want) {
  for (float x : [&] {
         std::vector<float> v(kN);
         cudaMemcpy(v.data(), p, kN * 4, cudaMemcpyDeviceToHost);
         return v;
       }())
    if (x != want) return false;
  return true;
}
static void set(float* p, float value) {
  const std::vector<float> v(kN, value);
  cudaMemcpy(p, v.data(), kN * 4, cudaMemcpyHostToDevice);
}

// Captures `body` and says how it ended.
template <class Body>
static cudaError_t captured(cudaStream_t stream, Body body, cudaGraph_t* graph) {
  cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
  const cudaError_t inside = body();
  const cudaError_t end = cudaStreamEndCapture(stream, graph);
  cudaGetLastError();
  return inside ? inside : end;
}

int main() {
  cudaStream_t stream;
  cudaStreamCreate(&stream);
  Array<float> in(kN), out(kN);
  set(in, 1), set(out, -1);

  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  float* scratch = nullptr;
  const cudaError_t e = captured(
      stream,
      [&] {
        cudaMallocAsync((void**)&scratch, kN * 4, stream);
        cudaMemsetAsync(scratch, 0, kN * 4, stream);
        scale<<<4, 256, 0, stream>>>(in, out, 3, kN);
        add<<<4, 256, 0, stream>>>(scratch, in, kN);
        add<<<4, 256, 0, stream>>>(out, scratch, kN);
        cudaFreeAsync(scratch, stream);
        return cudaGetLastError();
      },
      &graph);
  report("a capture of launches and stream-ordered calls", e == cudaSuccess && graph);
  report("nothing runs while it is recorded", all_are(out, -1));
  cudaGraphInstantiate(&exec, graph, 0);
  cudaGraphLaunch(exec, stream), cudaStreamSynchronize(stream);
  report("the first replay", all_are(out, 4));
  set(in, 10), cudaGraphLaunch(exec, stream), cudaStreamSynchronize(stream);
  report("a replay with other contents", all_are(out, 40));
  set(in, 0.5), cudaGraphLaunch(exec, stream);
  report("and again", all_are(out, 2));

  std::vector<float> host(kN);
  float* fresh = nullptr;
  cudaEvent_t event;
  cudaEventCreate(&event);
  auto refused = [&](const char* name, cudaError_t want, auto body) {
    cudaGraph_t none = nullptr;
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
    const cudaError_t got = body();
    cudaStreamCaptureStatus status;
    cudaStreamIsCapturing(stream, &status);
    const cudaError_t end = cudaStreamEndCapture(stream, &none);
    cudaGetLastError();
    report(name,
           got == want && status == cudaStreamCaptureStatusInvalidated &&
               end == cudaErrorStreamCaptureInvalidated && !none,
           cudaGetErrorName(got));
  };
  const cudaError_t no = cudaErrorStreamCaptureUnsupported,
                    implicit = cudaErrorStreamCaptureImplicit;
  refused("cudaDeviceSynchronize", no, [&] { return cudaDeviceSynchronize(); });
  refused("cudaStreamSynchronize", no, [&] { return cudaStreamSynchronize(stream); });
  refused("cudaEventSynchronize", no, [&] { return cudaEventSynchronize(event); });
  refused("cudaStreamQuery", no, [&] { return cudaStreamQuery(stream); });
  refused("cudaMalloc", no, [&] { return cudaMalloc((void**)&fresh, 64); });
  refused("cudaFree", no, [&] { return cudaFree(in.data); });
  refused("cudaMemcpy", no,
          [&] { return cudaMemcpy(host.data(), out, kN * 4, cudaMemcpyDeviceToHost); });
  refused("a copy to the host", no, [&] {
    return cudaMemcpyAsync(host.data(), out, kN * 4, cudaMemcpyDeviceToHost, stream);
  });
  refused("cudaMemset", no, [&] { return cudaMemset(out, 0, 4); });
  refused("a launch on the default stream", implicit, [&] {
    scale<<<4, 256>>>(in, out, 3, kN);
    return cudaGetLastError();
  });
  refused("a copy on the default stream", implicit,
          [&] { return cudaMemcpyAsync(out, in, 4, cudaMemcpyDeviceToDevice, 0); });
  cudaGraph_t again = nullptr;
  const cudaError_t after = captured(
      stream,
      [&] {
        scale<<<4, 256, 0, stream>>>(in, out, 5, kN);
        return cudaMemcpyAsync(in, out, kN * 4, cudaMemcpyDeviceToDevice, stream);
      },
      &again);
  report("a capture after refused ones, with a copy on the device", after == cudaSuccess && again);
  cudaGraphInstantiate(&exec, again, 0);
  set(in, 1);
  for (int i = 0; i < 3; i++) cudaGraphLaunch(exec, stream);
  report("three replays that build on each other", all_are(in, 125));
  cudaStream_t other;
  cudaStreamCreate(&other);
  cudaGraph_t forked = nullptr;
  const cudaError_t joined = captured(
      stream,
      [&] {
        cudaEventRecord(event, stream), cudaStreamWaitEvent(other, event, 0);
        scale<<<4, 256, 0, other>>>(in, out, 2, kN);
        cudaEventRecord(event, other), cudaStreamWaitEvent(stream, event, 0);
        return cudaGetLastError();
      },
      &forked);
  size_t nodes = 0;
  if (forked) cudaGraphGetNodes(forked, nullptr, &nodes);
  report("a second stream joins the capture", joined == cudaSuccess && nodes == 1);
  return finish();
}
