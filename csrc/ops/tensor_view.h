// SPDX-License-Identifier: Apache-2.0
//
// From torch tensors to what the backends take.
#pragma once
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/HeaderOnlyArrayRef.h>

#include <optional>

#include "core/params.h"

namespace deltanet::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// How a backend makes results: a new tensor on the device of `like`, contiguous, not
// initialized.
using NewTensor = Tensor(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes,
                         ScalarType dtype);

inline bool is_supported_dtype(ScalarType t) {
  return t == ScalarType::Float || t == ScalarType::Double || t == ScalarType::BFloat16 ||
         t == ScalarType::Half;
}

// For a supported dtype.
inline DType to_dtype(ScalarType t) {
  switch (t) {
    case ScalarType::Double:
      return DType::kFloat64;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    default:
      return DType::kFloat32;
  }
}

// Where the view of a tensor without elements points: such a tensor may have no memory, but its
// view must count as present. Never read or written.
inline char nothing;

template <int kRank>
View<kRank> view(const Tensor& x) {
  View<kRank> v;
  v.data = x.const_data_ptr();
  v.dtype = to_dtype(x.scalar_type());
  const auto strides = x.strides();
  for (int i = 0; i < kRank; ++i) v.stride[i] = strides[i];
  if (!v.data) v.data = &nothing;
  return v;
}

template <int kRank>
View<kRank> view(const std::optional<Tensor>& x) {
  return x ? view<kRank>(*x) : View<kRank>{};
}

template <int kRank>
MutableView<kRank> mutable_view(const Tensor& x) {
  MutableView<kRank> v;
  v.data = x.mutable_data_ptr();
  v.dtype = to_dtype(x.scalar_type());
  const auto strides = x.strides();
  for (int i = 0; i < kRank; ++i) v.stride[i] = strides[i];
  if (!v.data) v.data = &nothing;
  return v;
}

}  // namespace deltanet::ops
