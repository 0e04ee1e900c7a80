// Matrix products of few or many tokens with weights laid out for it.
//
// The weights [outputs, inputs] are cut into panels of kPanel outputs; a panel holds, for each input in turn (bfloat16: for
// each pair of inputs), its kPanel weights side by side. A tile of up to kTileRows tokens by one panel stays in registers
// while the inputs go by. Every result is summed over the inputs in the same order whatever the number of tokens, so what
// a token gets never depends on what it is batched with.
#pragma once

#include <omp.h>

#include <algorithm>
#include <type_traits>
#include <vector>

#include "vector.hpp"

namespace pando {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kPanelVectors = 3;  // 8 x 3 sums, 3 weights and 1 input fill 28 of 32 registers
constexpr int kTileRows = 8;
#else
constexpr int kPanelVectors = 2;  // 5 x 2 sums, 2 weights and 1 input fill 13 of 16 registers
constexpr int kTileRows = 5;
#endif
constexpr int kPanel = kPanelVectors * kLanes;

inline int panels_of(int outputs) { return (outputs + kPanel - 1) / kPanel; }

// How weights of a type meet inputs: kInputs of them at each step.
template <typename Weight>
struct Format {
  using Input = float;
  static constexpr int kInputs = 1;

  static Vector weights(const Weight* source) { return load(source); }
  static Vector input(const float* source) { return broadcast(*source); }
  static Vector add(Vector sums, Vector input, Vector weights) { return sums + input * weights; }
};

#if defined(__AVX512BF16__)
// Pairs of weights and inputs, both bfloat16, multiplied and added to float32 sums by one instruction.
template <>
struct Format<BFloat16> {
  using Input = BFloat16;
  static constexpr int kInputs = 2;

  static __m512bh weights(const BFloat16* source) { return (__m512bh)_mm512_loadu_si512(source); }
  static __m512bh input(const BFloat16* source) {
    int32_t pair;
    std::memcpy(&pair, source, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  static Vector add(Vector sums, __m512bh input, __m512bh weights) {
    return (Vector)_mm512_dpbf16_ps((__m512)sums, input, weights);
  }
};
#else
// Pairs of weights are widened to float32, which is exact; inputs stay float32.
template <>
struct Format<BFloat16> {
  using Input = float;
  static constexpr int kInputs = 2;
  struct Pair {
    Vector first, second;
  };

  static Pair weights(const BFloat16* source) {
    WordVector words;
    std::memcpy(&words, source, sizeof words);
    return {(Vector)(words << 16), (Vector)(words & 0xffff0000u)};
  }
  static Pair input(const float* source) { return {broadcast(source[0]), broadcast(source[1])}; }
  static Vector add(Vector sums, const Pair& input, const Pair& weights) {
    return sums + input.first * weights.first + input.second * weights.second;
  }
};
#endif

template <typename Weight>
using InputOf = typename Format<Weight>::Input;

// A laid-out matrix, and the biases of its outputs or null. `inputs` is a multiple of the format's kInputs.
template <typename Weight>
struct Matrix {
  const Weight* panels;
  const float* bias;
  int inputs;
  int outputs;

  const Weight* panel(int index) const { return panels + static_cast<long>(index) * kPanel * inputs; }
};

template <int Rows>
using Tile = Vector[Rows][kPanelVectors];

// Few tokens wait for memory: their weights are fetched into the second-level cache so far ahead.
constexpr int kFewTokens = 4, kFetchedBytes = 8192;

// Adds the products of `count` inputs, of rows `stride` apart, with weights [count, kPanel] to a tile.
template <int Rows, typename Weight>
inline void accumulate(const InputOf<Weight>* inputs, long stride, const Weight* weights, int count, Tile<Rows>& sums) {
  using Way = Format<Weight>;
  for (int i = 0; i < count; i += Way::kInputs) {
    const Weight* step = weights + static_cast<long>(i) * kPanel;
    decltype(Way::weights(weights)) weight[kPanelVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kPanelVectors; ++v) {
      const Weight* source = step + v * kLanes * Way::kInputs;
      if constexpr (Rows <= kFewTokens)
        __builtin_prefetch(reinterpret_cast<const char*>(source) + kFetchedBytes, 0, 2);
      weight[v] = Way::weights(source);
    }
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row) {
      const auto input = Way::input(inputs + row * stride + i);
#pragma GCC unroll 8
      for (int v = 0; v < kPanelVectors; ++v) sums[row][v] = Way::add(sums[row][v], input, weight[v]);
    }
  }
}

template <int Rows, typename Weight>
inline void multiply(const InputOf<Weight>* inputs, const Matrix<Weight>& matrix, int panel, Tile<Rows>& sums) {
#pragma GCC unroll 8
  for (int row = 0; row < Rows; ++row)
#pragma GCC unroll 8
    for (int v = 0; v < kPanelVectors; ++v) sums[row][v] = Vector{};
  accumulate<Rows, Weight>(inputs, matrix.inputs, matrix.panel(panel), matrix.inputs, sums);
  if (matrix.bias == nullptr) return;
  float bias[kPanel] = {};
  const int first = panel * kPanel;
  std::copy_n(matrix.bias + first, std::min(kPanel, matrix.outputs - first), bias);
#pragma GCC unroll 8
  for (int row = 0; row < Rows; ++row)
#pragma GCC unroll 8
    for (int v = 0; v < kPanelVectors; ++v) sums[row][v] += load(bias + v * kLanes);
}

// Writes a tile to outputs [tokens, width], or adds it; columns after the last one are dropped.
template <int Rows>
inline void put(Tile<Rows>& tile, float* outputs, int width, int first, bool accumulate) {
  const int columns = std::min(kPanel, width - first);
#pragma GCC unroll 8
  for (int row = 0; row < Rows; ++row) {
    float* target = outputs + static_cast<long>(row) * width + first;
    if (columns == kPanel) {
#pragma GCC unroll 8
      for (int v = 0; v < kPanelVectors; ++v) {
        float* place = target + v * kLanes;
        store(place, accumulate ? load(place) + tile[row][v] : tile[row][v]);
      }
      continue;
    }
    float line[kPanel];
#pragma GCC unroll 8
    for (int v = 0; v < kPanelVectors; ++v) store(line + v * kLanes, tile[row][v]);
    for (int i = 0; i < columns; ++i) target[i] = accumulate ? target[i] + line[i] : line[i];
  }
}

// outputs = (outputs if accumulate) + inputs x weights + bias
template <typename Weight>
struct Product {
  Matrix<Weight> matrix;
  const InputOf<Weight>* inputs;
  float* outputs;
  bool accumulate;

  int width() const { return matrix.outputs; }
  int depth() const { return matrix.inputs; }

  template <int Rows>
  void tile(int row, int panel) const {
    Tile<Rows> sums;
    multiply<Rows>(inputs + static_cast<long>(row) * depth(), matrix, panel, sums);
    put<Rows>(sums, outputs + static_cast<long>(row) * width(), width(), panel * kPanel, accumulate);
  }
};

enum class Activation { kSilu = 0, kGeluTanh = 1, kClampedSwiglu = 2 };

constexpr float kSwigluAlpha = 1.702f, kSwigluLimit = 7.0f;

// silu(x) = x * sigmoid(x), and GELU's approximation x * (1 + tanh(u / 2)) / 2 = x * sigmoid(u).
inline Vector activate(Vector x, Activation activation) {
  if (activation == Activation::kClampedSwiglu) {
    const Vector gate = minimum(broadcast(kSwigluLimit), x);
    return gate / (1.0f + exponential(-kSwigluAlpha * gate));
  }
  const Vector u = activation == Activation::kSilu ? x : 1.5957691216057308f * (x + 0.044715f * x * x * x);
  return x / (1.0f + exponential(-u));
}

// The other half of a gated layer times its activated gate.
inline Vector gated(Vector up, Vector activated, Activation activation) {
  if (activation != Activation::kClampedSwiglu) return up * activated;
  return (minimum(broadcast(kSwigluLimit), maximum(broadcast(-kSwigluLimit), up)) + 1.0f) * activated;
}

// outputs = inputs x gate and inputs x up, joined as `Activation` says
template <typename Weight>
struct GatedProduct {
  Matrix<Weight> gate;
  Matrix<Weight> up;
  const InputOf<Weight>* inputs;
  float* outputs;
  Activation activation;

  int width() const { return gate.outputs; }
  int depth() const { return gate.inputs; }

  template <int Rows>
  void tile(int row, int panel) const {
    const InputOf<Weight>* first = inputs + static_cast<long>(row) * depth();
    Tile<Rows> gates;
    multiply<Rows>(first, gate, panel, gates);
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 8
      for (int v = 0; v < kPanelVectors; ++v) gates[i][v] = activate(gates[i][v], activation);
    Tile<Rows> ups;
    multiply<Rows>(first, up, panel, ups);
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 8
      for (int v = 0; v < kPanelVectors; ++v) ups[i][v] = gated(ups[i][v], gates[i][v], activation);
    put<Rows>(ups, outputs + static_cast<long>(row) * width(), width(), panel * kPanel, false);
  }
};

template <int Rows, typename Operation>
inline void run_tile(const Operation& operation, int rows, int row, int panel) {
  if (rows == Rows) {
    operation.template tile<Rows>(row, panel);
  } else if constexpr (Rows > 1) {
    run_tile<Rows - 1>(operation, rows, row, panel);
  }
}

// Runs all tiles, with the threads of the parallel region around it, and waits for them. A panel stays in a thread's cache
// for all tokens. Threads get long runs of panels first, which memory delivers faster than scattered ones (one token: by
// a third), and single ones in the end, because other processes share the cores. Where panels are few, the tokens are cut
// up too.
template <typename Operation>
void share_tiles(const Operation& operation, int tokens) {
  const int panels = panels_of(operation.width());
  const int tiles = (tokens + kTileRows - 1) / kTileRows;
  const int wanted = std::max(1, 4 * omp_get_num_threads() / panels);
  const int tiles_per_task = std::max(1, tiles / wanted);
  const int cuts = (tiles + tiles_per_task - 1) / tiles_per_task;
#pragma omp for schedule(guided)
  for (int task = 0; task < panels * cuts; ++task) {
    const int panel = task / cuts, first = task % cuts * tiles_per_task;
    for (int tile = first; tile < std::min(tiles, first + tiles_per_task); ++tile) {
      const int row = tile * kTileRows;
      run_tile<kTileRows>(operation, std::min(kTileRows, tokens - row), row, panel);
    }
  }
}

// Inputs in the type that products with `Weight` take; valid until the calling thread asks again.
template <typename Weight>
const InputOf<Weight>* convert_inputs(const float* inputs, long count, int threads) {
  if constexpr (std::is_same_v<InputOf<Weight>, float>) {
    return inputs;
  } else {
    static thread_local std::vector<InputOf<Weight>> converted;
    converted.resize(count);
    InputOf<Weight>* target = converted.data();
#pragma omp parallel for num_threads(threads) if (count > 1 << 16)
    for (long i = 0; i < count; ++i) from_float(inputs[i], target + i);
    return target;
  }
}

}  // namespace pando
