// The plain C face of the operators. Element types are numbered as in `ElementType` of native_library.py.
#include <omp.h>

#include "attention_tasks.hpp"
#include "elementwise.hpp"
#include "layers.hpp"
#include "matrix.hpp"
#include "panels.hpp"

namespace {

enum ElementType { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kFloat8 = 3 };

template <typename Function>
void with_type(int type, Function function) {
  switch (type) {
    case kFloat16:
      return function(pando::Float16{});
    case kBFloat16:
      return function(pando::BFloat16{});
    default:
      return function(0.0f);
  }
}

// Keys and values may be in FP8, too.
template <typename Function>
void with_kv_type(int type, Function function) {
  if (type == kFloat8) return function(pando::Float8{});
  with_type(type, function);
}

}  // namespace

extern "C" {

int pando_lanes() { return pando::kLanes; }
int pando_panel() { return pando::kPanel; }
// Whether products with bfloat16 weights round their inputs to bfloat16 as well.
int pando_rounds_inputs() { return std::is_same_v<pando::InputOf<pando::BFloat16>, pando::BFloat16>; }
// Whether products with packed weights and bfloat16 inputs sum groups of integers, without rounding weights.
int pando_sums_groups() { return pando::sums_groups<pando::BFloat16>({nullptr, nullptr, nullptr, 0, 0, 4}); }
// Whether products of blocks may replace those of weights of this type, and oneDNN has them for this processor.
int pando_has_blocks(const pando::BlockFunctions* blocks, int type) {
  int has_blocks = 0;
  with_type(type, [&](auto element) {
    using Weight = decltype(element);
    if constexpr (pando::kHasBlocks<Weight>) {
      constexpr int kDepth = 64;
      const std::vector<Weight> inputs(kDepth), weights(kDepth * pando::kPanel);
      std::vector<float> sums(pando::kPanel);
      try {
        pando::multiply_blocks<Weight>(*blocks, inputs.data(), kDepth, weights.data(), kDepth, 1, false, sums.data());
        blocks->release(true);
        has_blocks = 1;
      } catch (...) {
        // oneDNN cannot generate code for this type and processor.
      }
    }
  });
  return has_blocks;
}
// Whether attention over keys and values in bfloat16 is that of tiles, which round queries and shares to it as well.
int pando_attends_by_tiles() { return pando::attends_by_tiles<pando::BFloat16>(); }
int pando_max_head_dim() { return pando::kMaxHeadDim; }

// Lays out integers [outputs, inputs] of `bits` bits in panels, which are zero before.
void pando_pack(const uint8_t* integers, int outputs, int inputs, int bits, uint8_t* panels, int threads) {
  const auto pack = bits == 4   ? pando::pack<4>
                    : bits == 5 ? pando::pack<5>
                    : bits == 6 ? pando::pack<6>
                                : pando::pack<8>;
  pack(integers, outputs, inputs, panels, threads);
}

void pando_linear(const float* inputs, const pando::MatrixArguments* matrix, int type, int tokens, float* outputs,
                  int accumulate, int threads) {
  with_type(type, [&](auto element) {
    using Weight = decltype(element);
    const auto* converted = pando::convert_inputs<Weight>(inputs, static_cast<long>(tokens) * matrix->inputs, threads);
#pragma omp parallel num_threads(threads)
    {
      pando::share_product<Weight>(*matrix, converted, tokens, outputs, accumulate != 0);
      pando::release_blocks(*matrix);
    }
  });
}

void pando_gated_linear(const float* inputs, const pando::MatrixArguments* gate, const pando::MatrixArguments* up,
                        int type, int tokens, float* outputs, int activation, int threads) {
  with_type(type, [&](auto element) {
    using Weight = decltype(element);
    const auto* converted = pando::convert_inputs<Weight>(inputs, static_cast<long>(tokens) * gate->inputs, threads);
    const auto bend = static_cast<pando::Activation>(activation);
#pragma omp parallel num_threads(threads)
    {
      pando::share_gated_product<Weight>(*gate, *up, converted, tokens, outputs, bend);
      pando::release_blocks(*gate);
    }
  });
}

void pando_rms_norm(const float* inputs, const float* weight, float epsilon, int tokens, int width, float* outputs,
                    int threads) {
  pando::rms_norm(inputs, weight, epsilon, tokens, width, outputs, threads);
}

void pando_store(const pando::StoreArguments* arguments, void* keys, void* values, int type) {
  with_kv_type(type, [&](auto element) {
    using Element = decltype(element);
    pando::rotate_and_store(*arguments, static_cast<Element*>(keys), static_cast<Element*>(values));
  });
}

void pando_attend(const pando::AttentionArguments* arguments, const void* keys, const void* values, int type) {
  with_kv_type(type, [&](auto element) {
    using Element = decltype(element);
    pando::attend(*arguments, static_cast<const Element*>(keys), static_cast<const Element*>(values));
  });
}

void pando_layers(const pando::LayersArguments* arguments, int weights_type, int kv_type) {
  with_type(weights_type, [&](auto weight) {
    with_kv_type(kv_type, [&](auto element) { pando::run_layers<decltype(weight), decltype(element)>(*arguments); });
  });
}

}  // extern "C"
