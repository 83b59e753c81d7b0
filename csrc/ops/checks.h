// SPDX-License-Identifier: Apache-2.0
//
// Checks of operator arguments, before any memory is touched. The Python functions check first and
// raise ValueError or TypeError; these hold for whoever calls the operators directly, and for what
// Python cannot see while it traces (the contents of cu_seqlens). No check reads a tensor's data,
// except cu_seqlens.
#pragma once
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "ops/tensor_view.h"

namespace deltanet::ops {

inline std::string shape_of(const Tensor& x) {
  std::ostringstream text;
  text << '[';
  for (size_t i = 0; i < x.sizes().size(); ++i) text << (i ? ", " : "") << x.sizes()[i];
  text << ']';
  return text.str();
}

inline const char* name_of(ScalarType t) {
  switch (t) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    default:
      return "another dtype";
  }
}

// `wanted` is both the sizes and, through `letters`, how the message calls them.
inline void check_shape(const char* op, const char* name, const Tensor& x,
                        const std::vector<int64_t>& wanted, const char* letters) {
  bool same = x.dim() == int64_t(wanted.size());
  for (size_t i = 0; same && i < wanted.size(); ++i) same = x.sizes()[i] == wanted[i];
  if (same) return;
  std::ostringstream text;
  text << letters << " = [";
  for (size_t i = 0; i < wanted.size(); ++i) text << (i ? ", " : "") << wanted[i];
  text << ']';
  STD_TORCH_CHECK(false, op, ": ", name, " has shape ", shape_of(x), "; expected ", text.str());
}

inline void check_rank(const char* op, const char* name, const Tensor& x, int64_t rank,
                       const char* letters) {
  STD_TORCH_CHECK(x.dim() == rank, op, ": ", name, " has shape ", shape_of(x), "; expected ",
                  letters);
}

// Where a backend wants its tensors: throws for one that lies elsewhere.
using CheckDevice = void(const char* op, const char* name, const Tensor& x);

inline void check_on_cpu(const char* op, const char* name, const Tensor& x) {
  STD_TORCH_CHECK(x.is_cpu(), op, ": ", name, " is not on the CPU, as the other arguments are");
}

inline void check_float(const char* op, const char* name, const Tensor& x, CheckDevice& device) {
  device(op, name, x);
  STD_TORCH_CHECK(is_supported_dtype(x.scalar_type()), op, ": ", name, " is ",
                  name_of(x.scalar_type()), "; supported: float32, float64, bfloat16, float16");
}

// g, beta: fp32 or the dtype of q, k, v. fp64 and narrower types do not mix.
inline void check_gate_dtype(const char* op, const char* name, const Tensor& x, ScalarType qkv) {
  const ScalarType t = x.scalar_type();
  STD_TORCH_CHECK(t == qkv || (t == ScalarType::Float && qkv != ScalarType::Double), op, ": ", name,
                  " is ", name_of(t), "; supported with ", name_of(qkv), " inputs: ",
                  qkv == ScalarType::Double ? "float64" : "float32 or the dtype of the inputs");
}

inline void check_index(const char* op, CheckDevice& device, const char* name, const Tensor& x) {
  device(op, name, x);
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Int || x.scalar_type() == ScalarType::Long, op,
                  ": ", name, " is ", name_of(x.scalar_type()), "; supported: int32, int64");
}

// Integers of an index tensor on the CPU.
inline int64_t index_at(const Tensor& x, int64_t offset) {
  return x.scalar_type() == ScalarType::Int
             ? static_cast<const int32_t*>(x.const_data_ptr())[offset]
             : static_cast<const int64_t*>(x.const_data_ptr())[offset];
}

// The contents of indices [B] into a pool of `slots` states, each at most once; -1 for any negative
// one.
inline std::vector<int64_t> read_slots(const char* op, const char* name, const Tensor& x,
                                       int64_t slots) {
  std::vector<int64_t> found;
  std::vector<bool> taken(static_cast<size_t>(slots));
  for (int64_t b = 0; b < x.sizes()[0]; ++b) {
    const int64_t slot = index_at(x, b * x.strides()[0]);
    STD_TORCH_CHECK(slot < slots, op, ": ", name, " has ", slot, " at position ", b,
                    "; supported: below the ", slots, " states, or negative for none");
    STD_TORCH_CHECK(slot < 0 || !taken[size_t(slot)], op, ": ", name, " has ", slot,
                    " twice; two rows would write one state");
    if (slot >= 0) taken[size_t(slot)] = true;
    found.push_back(slot < 0 ? -1 : slot);
  }
  return found;
}

// Of a tensor that is written: elements that share memory cannot be written one by one.
inline void check_own_memory(const char* op, const char* name, const Tensor& x) {
  std::vector<std::pair<int64_t, int64_t>> axes;  // stride, size
  for (int64_t i = 0; i < x.dim(); ++i)
    if (x.sizes()[i] > 1) axes.emplace_back(x.strides()[i], x.sizes()[i]);
  std::sort(axes.begin(), axes.end());
  int64_t reach = 0;
  for (const auto& [stride, size] : axes) {
    STD_TORCH_CHECK(stride > reach, op, ": ", name, " overlaps itself (shape ", shape_of(x),
                    "); supported: elements with memory of their own");
    reach += stride * (size - 1);
  }
}

// All of cu_seqlens but its contents.
inline void check_cu_seqlens(const char* op, const Tensor& x, int64_t batch, CheckDevice& device) {
  check_rank(op, "cu_seqlens", x, 1, "[N + 1]");
  device(op, "cu_seqlens", x);
  const ScalarType t = x.scalar_type();
  STD_TORCH_CHECK(t == ScalarType::Int || t == ScalarType::Long, op, ": cu_seqlens is ", name_of(t),
                  "; supported: int32, int64");
  STD_TORCH_CHECK(batch == 1, op, ": cu_seqlens packs sequences into one batch row; the batch is ",
                  batch);
  STD_TORCH_CHECK(x.sizes()[0] >= 1, op, ": cu_seqlens is empty; it must start with 0");
}

// The contents of cu_seqlens, as int64 in host memory.
inline std::vector<int64_t> read_cu_seqlens(const char* op, const Tensor& x, int64_t batch,
                                            int64_t tokens) {
  check_cu_seqlens(op, x, batch, check_on_cpu);
  const ScalarType t = x.scalar_type();
  std::vector<int64_t> starts(x.sizes()[0]);
  const int64_t stride = x.strides()[0];
  for (size_t i = 0; i < starts.size(); ++i)
    starts[i] = t == ScalarType::Int
                    ? static_cast<const int32_t*>(x.const_data_ptr())[int64_t(i) * stride]
                    : static_cast<const int64_t*>(x.const_data_ptr())[int64_t(i) * stride];
  STD_TORCH_CHECK(starts[0] == 0, op, ": cu_seqlens starts with ", starts[0],
                  "; it must start with 0");
  for (size_t i = 1; i < starts.size(); ++i)
    STD_TORCH_CHECK(starts[i] >= starts[i - 1], op, ": cu_seqlens decreases from ", starts[i - 1],
                    " to ", starts[i], " at position ", i);
  STD_TORCH_CHECK(starts.back() <= tokens, op, ": cu_seqlens ends at ", starts.back(),
                  ", beyond the ", tokens, " tokens");
  return starts;
}

// Checks of unit_lower_triangular_inverse. Returns C.
inline int64_t check_inverse(const char* op, CheckDevice& device, const Tensor& L) {
  const int64_t rank = L.dim();
  STD_TORCH_CHECK(rank >= 2 && L.sizes()[rank - 1] == L.sizes()[rank - 2], op, ": L has shape ",
                  shape_of(L), "; expected [..., C, C]");
  const int64_t size = L.sizes()[rank - 1];
  STD_TORCH_CHECK(size >= 1 && size <= kMaxInverseSize, op, ": L has size ", size,
                  "; supported: 1 to ", kMaxInverseSize);
  check_float(op, "L", L, device);
  return size;
}

}  // namespace deltanet::ops
