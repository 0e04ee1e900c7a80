// Matrix products of few or many tokens with weights laid out for it.
//
// The weights [outputs, inputs] are cut into panels of kPanel outputs; a panel holds, for each input in turn, its kPanel
// weights side by side. A tile of up to kTileRows tokens by one panel stays in registers while the inputs go by. Every
// result is summed over the inputs in the same order whatever the number of tokens, so what a token gets never depends
// on what it is batched with.
#pragma once

#include <algorithm>

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

// Weights of one panel, and the biases of its outputs or null.
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

template <int Rows, typename Weight>
inline void multiply(const float* inputs, const Matrix<Weight>& matrix, int panel, Tile<Rows>& sums) {
  const int depth = matrix.inputs;
  const Weight* weights = matrix.panel(panel);
#pragma GCC unroll 8
  for (int row = 0; row < Rows; ++row)
#pragma GCC unroll 8
    for (int v = 0; v < kPanelVectors; ++v) sums[row][v] = Vector{};
  for (int i = 0; i < depth; ++i) {
    Vector weight[kPanelVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kPanelVectors; ++v) weight[v] = load(weights + static_cast<long>(i) * kPanel + v * kLanes);
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row) {
      const Vector input = broadcast(inputs[static_cast<long>(row) * depth + i]);
#pragma GCC unroll 8
      for (int v = 0; v < kPanelVectors; ++v) sums[row][v] += input * weight[v];
    }
  }
  if (matrix.bias == nullptr) return;
  float bias[kPanel] = {};
  const int first = panel * kPanel;
  std::copy_n(matrix.bias + first, std::min(kPanel, matrix.outputs - first), bias);
#pragma GCC unroll 8
  for (int row = 0; row < Rows; ++row)
#pragma GCC unroll 8
    for (int v = 0; v < kPanelVectors; ++v) sums[row][v] += load(bias + v * kLanes);
}

// Writes a tile to outputs [tokens, width], or adds it; columns behind the last one are dropped.
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
  const float* inputs;
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

// outputs = silu(inputs x gate) * (inputs x up)
template <typename Weight>
struct GatedProduct {
  Matrix<Weight> gate;
  Matrix<Weight> up;
  const float* inputs;
  float* outputs;

  int width() const { return gate.outputs; }
  int depth() const { return gate.inputs; }

  template <int Rows>
  void tile(int row, int panel) const {
    const float* first = inputs + static_cast<long>(row) * depth();
    Tile<Rows> gates;
    multiply<Rows>(first, gate, panel, gates);
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 8
      for (int v = 0; v < kPanelVectors; ++v) gates[i][v] = gates[i][v] / (1.0f + exponential(-gates[i][v]));
    Tile<Rows> ups;
    multiply<Rows>(first, up, panel, ups);
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 8
      for (int v = 0; v < kPanelVectors; ++v) ups[i][v] *= gates[i][v];
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

// Runs all tiles. A thread takes one panel at a time, which its cache then holds for all tokens; panels are handed out
// as threads come, because other processes share the cores. Where panels are few, the tokens are cut up too.
template <typename Operation>
void run_tiles(const Operation& operation, int tokens, int threads) {
  const int panels = panels_of(operation.width());
  const int tiles = (tokens + kTileRows - 1) / kTileRows;
  const int wanted = std::max(1, 4 * threads / panels);
  const int tiles_per_task = std::max(1, tiles / wanted);
  const int cuts = (tiles + tiles_per_task - 1) / tiles_per_task;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (int task = 0; task < panels * cuts; ++task) {
    const int panel = task / cuts, first = task % cuts * tiles_per_task;
    for (int tile = first; tile < std::min(tiles, first + tiles_per_task); ++tile) {
      const int row = tile * kTileRows;
      run_tile<kTileRows>(operation, std::min(kTileRows, tokens - row), row, panel);
    }
  }
}

}  // namespace pando
