// Products of panels of weights: packed ones, those of 16 bits that many tokens meet, and all that AMX or oneDNN
// multiply.
//
// Unless groups are summed by themselves (groups.hpp), some inputs of a panel at a time are unpacked to the type that
// products multiply, into memory that stays in the nearest cache, and multiplied with all tokens before the next ones
// are. Every weight is unpacked, and every result summed, in the same way whatever the number of tokens.
#pragma once

#include <limits>
#include <vector>

#include "blocks.hpp"
#include "groups.hpp"
#include "matrix.hpp"
#include "packed.hpp"
#include "tiles.hpp"

namespace pando {

// Adds the products of inputs [begin, begin + count) of all tokens, whose weights are unpacked, to sums [tokens, kPanel].
template <int Rows, typename Weight>
inline void add_unpacked(const InputOf<Weight>* inputs, int depth, int begin, int count, const Weight* weights,
                         int tokens, float* sums) {
  int row = 0;
  for (; row + Rows <= tokens; row += Rows) {
    Tile<Rows> tile;
    float* target = sums + static_cast<long>(row) * kPanel;
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 8
      for (int v = 0; v < kPanelVectors; ++v)
        tile[i][v] = begin == 0 ? Vector{} : load(target + i * kPanel + v * kLanes);
    accumulate<Rows, Weight>(inputs + static_cast<long>(row) * depth + begin, depth, weights, count, tile);
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 8
      for (int v = 0; v < kPanelVectors; ++v) store(target + i * kPanel + v * kLanes, tile[i][v]);
  }
  if constexpr (Rows > 1)
    if (row < tokens)
      add_unpacked<Rows - 1, Weight>(inputs + static_cast<long>(row) * depth, depth, begin, count, weights,
                                     tokens - row, sums + static_cast<long>(row) * kPanel);
}

// Adds the products of inputs [begin, begin + count) of all tokens with weights [count, kPanel] to sums [tokens, kPanel];
// the first ones set the sums. `fetches`: memory is to be read ahead, since these are the first tokens of the weights.
template <typename Weight>
inline void add_products(const MatrixArguments& matrix, const InputOf<Weight>* inputs, int begin, int count,
                         const Weight* weights, int tokens, float* sums, [[maybe_unused]] bool fetches) {
  if constexpr (kHasBlocks<Weight>)
    if (matrix.blocks != nullptr)
      return multiply_blocks<Weight>(*matrix.blocks, inputs + begin, matrix.inputs, weights, count, tokens, begin > 0,
                                     sums);
#ifdef PANDO_TILES
  if constexpr (std::is_same_v<Weight, BFloat16>)
    if (kHasTiles) return multiply_tiles(inputs + begin, matrix.inputs, weights, count, tokens, begin > 0, sums, fetches);
#endif
  add_unpacked<kTileRows, Weight>(inputs, matrix.inputs, begin, count, weights, tokens, sums);
}

// Calls `function` with the bits of a packed matrix, and whether they are FP4, as constants.
template <typename Function>
inline void with_format(const MatrixArguments& matrix, Function function) {
  switch (matrix.bits) {
    case 4:
      if (matrix.is_e2m1) return function(std::integral_constant<int, 4>{}, std::true_type{});
      return function(std::integral_constant<int, 4>{}, std::false_type{});
    case 5:
      return function(std::integral_constant<int, 5>{}, std::false_type{});
    case 6:
      return function(std::integral_constant<int, 6>{}, std::false_type{});
    default:
      return function(std::integral_constant<int, 8>{}, std::false_type{});
  }
}

// Unpacks inputs [begin, end) of a panel, whatever is stored.
template <typename Weight>
inline void unpack_any(const MatrixArguments& matrix, int panel, int begin, int end, Unpacked<Weight>* target) {
  if (matrix.bits != 0)
    with_format(matrix, [&](auto bits, auto is_e2m1) { unpack<bits, is_e2m1>(matrix, panel, begin, end, target); });
  else if constexpr (kIsWidened<Weight>)
    widen(matrix_of<Weight>(matrix).panel(panel), begin, end, target);
}

// Inputs of a product [tokens, in], and the sums of their groups if it needs any: see groups.hpp.
template <typename Weight>
struct ProductInputs {
  const InputOf<Weight>* numbers;
  const float* sums;
};

// The inputs of a product; `Place` as `share_input_sums` takes it.
template <typename Weight, int Place = 0>
ProductInputs<Weight> share_inputs(const MatrixArguments& matrix, const InputOf<Weight>* numbers, int tokens) {
#ifdef PANDO_GROUPS
  if constexpr (std::is_same_v<Weight, BFloat16>) return {numbers, share_input_sums<Place>(matrix, numbers, tokens)};
#endif
  return {numbers, nullptr};
}

// Multiplies few tokens with float32 weights that are unpacked to registers, and returns whether it did: sums are those of
// `panel_sums`.
template <typename Number>
inline bool try_multiply_few(const MatrixArguments& matrix, const Number* inputs, int tokens, int panel, float* sums) {
  if constexpr (std::is_same_v<Number, float>)
    if (matrix.bits != 0 && matrix.blocks == nullptr && tokens <= kScaledRows) {
      with_format(matrix, [&](auto bits, auto is_e2m1) {
        with_rows<kScaledRows>(tokens, [&](auto rows) {
          multiply_scaled<rows, decltype(bits)::value, decltype(is_e2m1)::value>(matrix, panel, inputs, sums);
        });
      });
      return true;
    }
  return false;
}

// Returns tokens from `first` on times one panel, [tokens, kPanel], in `sums`; `fetches` as in `add_products`.
template <typename Weight>
inline float* panel_sums(const MatrixArguments& matrix, const ProductInputs<Weight>& given, int first, int tokens,
                         int panel, bool fetches, std::vector<float>& sums) {
  using Number = Unpacked<Weight>;
  const Number* inputs = given.numbers + static_cast<long>(first) * matrix.inputs;
  sums.resize(static_cast<long>(tokens) * kPanel);
  if (sums_groups<Weight>(matrix)) {
#ifdef PANDO_GROUPS
    if constexpr (std::is_same_v<Weight, BFloat16>) {
      const long skipped = matrix.has_shifts ? static_cast<long>(first) * (matrix.inputs / matrix.group) : 0;
      with_format(matrix, [&](auto bits, auto is_e2m1) {
        group_sums<bits, is_e2m1>(matrix, panel, inputs, given.sums + skipped, tokens, sums.data());
      });
    }
#endif
  } else if (matrix.bits == 0 && !kIsWidened<Weight>) {
    const Number* whole = matrix_of<Number>(matrix).panel(panel);
    add_products<Number>(matrix, inputs, 0, matrix.inputs, whole, tokens, sums.data(), fetches);
  } else if (!try_multiply_few(matrix, inputs, tokens, panel, sums.data())) {
    Number* weights = unpacked_memory<Number>();
    for (int begin = 0; begin < matrix.inputs; begin += kUnpacked) {
      const int end = std::min(matrix.inputs, begin + kUnpacked);
      unpack_any<Weight>(matrix, panel, begin, end, weights);
      add_products<Number>(matrix, inputs, begin, end - begin, weights, tokens, sums.data(), false);
    }
  }
  if (matrix.bias != nullptr) {
    const int output = panel * kPanel, columns = std::min(kPanel, matrix.outputs - output);
    for (int token = 0; token < tokens; ++token)
      for (int i = 0; i < columns; ++i) sums[static_cast<long>(token) * kPanel + i] += matrix.bias[output + i];
  }
  return sums.data();
}

// Tokens that are multiplied with a panel at a time: weights are unpacked once for all.
template <typename Weight>
int tokens_at_once(const MatrixArguments& matrix, int tokens) {
  return matrix.bits == 0 && !kIsWidened<Weight> ? std::min(kBlockRows, tokens) : tokens;
}

// Tokens whose inputs stay in the second-level cache while panels go by. Only tiles are so fast that it matters: all of
// their processors have 2 MiB for each core.
template <typename Weight>
int cached_tokens(const MatrixArguments& matrix) {
  if (!uses_tiles<Weight>()) return std::numeric_limits<int>::max();
  constexpr int kCachedBytes = 5 << 18;
  return std::max(kBlockRows, kCachedBytes / (matrix.inputs * static_cast<int>(sizeof(Weight))));
}

// outputs = (outputs if accumulate) + inputs x weights + bias
template <typename Weight>
struct PanelProduct {
  MatrixArguments matrix;
  ProductInputs<Weight> inputs;
  float* outputs;
  bool accumulate;

  int width() const { return matrix.outputs; }
  int step(int tokens) const { return tokens_at_once<Weight>(matrix, tokens); }
  int cached() const { return cached_tokens<Weight>(matrix); }

  void run(int first, int tokens, int panel, bool fetches) const {
    static thread_local std::vector<float> memory;
    const float* sums = panel_sums<Weight>(matrix, inputs, first, tokens, panel, fetches, memory);
    const int columns = std::min(kPanel, width() - panel * kPanel);
    for (int token = 0; token < tokens; ++token) {
      float* target = outputs + static_cast<long>(first + token) * width() + panel * kPanel;
      const float* line = sums + static_cast<long>(token) * kPanel;
      if (columns == kPanel)
        for (int i = 0; i < kPanel; i += kLanes)
          store(target + i, accumulate ? load(target + i) + load(line + i) : load(line + i));
      else
        for (int i = 0; i < columns; ++i) target[i] = accumulate ? target[i] + line[i] : line[i];
    }
  }
};

// outputs = inputs x gate and inputs x up, joined as `Activation` says, and rounded if they are the next product's inputs.
template <typename Weight, typename Output>
struct PanelGatedProduct {
  MatrixArguments gate, up;
  ProductInputs<Weight> gate_inputs, up_inputs;
  Output* outputs;
  Activation activation;

  int width() const { return gate.outputs; }
  int step(int tokens) const { return tokens_at_once<Weight>(gate, tokens); }
  int cached() const { return cached_tokens<Weight>(gate); }

  void run(int first, int tokens, int panel, bool fetches) const {
    static thread_local std::vector<float> gate_memory, up_memory;
    const float* gates = panel_sums<Weight>(gate, gate_inputs, first, tokens, panel, fetches, gate_memory);
    const float* ups = panel_sums<Weight>(up, up_inputs, first, tokens, panel, fetches, up_memory);
    const int columns = std::min(kPanel, width() - panel * kPanel);
    Output rest[kPanel];
    for (int token = 0; token < tokens; ++token) {
      const long place = static_cast<long>(token) * kPanel;
      Output* target = outputs + static_cast<long>(first + token) * width() + panel * kPanel;
      Output* line = columns == kPanel ? target : rest;
      for (int v = 0; v < kPanelVectors; ++v) {
        const long at = place + v * kLanes;
        store(line + v * kLanes, gated(load(ups + at), activate(load(gates + at), activation), activation));
      }
      if (line == rest) std::copy_n(rest, columns, target);
    }
  }
};

// As `share_tiles`: runs all panels with the threads of the parallel region around it, cutting tokens up where panels
// are few or inputs many.
template <typename Operation>
void share_panels(const Operation& operation, int tokens) {
  const int panels = panels_of(operation.width());
  const int unit = tokens > 4 * kBlockRows ? kBlockRows / 2 : kTileRows;  // full tiles, unless there are few
  const int tiles = (tokens + unit - 1) / unit;
  const int wanted = std::max({1, 4 * omp_get_num_threads() / panels, (tokens - 1) / operation.cached() + 1});
  const int tokens_per_task = (tiles + wanted - 1) / wanted * unit;
  const int cuts = (tokens + tokens_per_task - 1) / tokens_per_task;
#pragma omp for schedule(guided)
  for (int task = 0; task < panels * cuts; ++task) {
    const int begin = task / panels * tokens_per_task, end = std::min(tokens, begin + tokens_per_task);
    const int step = operation.step(end - begin);
    for (int first = begin; first < end; first += step)
      operation.run(first, std::min(step, end - first), task % panels, first == begin);
  }
}

// Whether a product takes whole panels rather than tiles that stay in registers.
template <typename Weight>
bool takes_panels(const MatrixArguments& matrix, int tokens) {
  return matrix.bits != 0 || uses_tiles<Weight>() || (kHasBlocks<Weight> && matrix.blocks != nullptr) ||
         (kIsWidened<Weight> && tokens >= kWorthWidening);
}

// Shares a product among the threads of the region around it, whether its weights are packed or not.
template <typename Weight>
void share_product(const MatrixArguments& matrix, const InputOf<Weight>* inputs, int tokens, float* outputs,
                   bool accumulate) {
  if (takes_panels<Weight>(matrix, tokens))
    share_panels(PanelProduct<Weight>{matrix, share_inputs<Weight>(matrix, inputs, tokens), outputs, accumulate}, tokens);
  else
    share_tiles(Product<Weight>{matrix_of<Weight>(matrix), inputs, outputs, accumulate}, tokens);
}

// Shares a gated product by panels.
template <typename Weight, typename Output>
void share_gated_panels(const MatrixArguments& gate, const MatrixArguments& up, const InputOf<Weight>* inputs,
                        int tokens, Output* outputs, Activation activation) {
  const auto gate_inputs = share_inputs<Weight>(gate, inputs, tokens);
  const bool are_same = gate.group == up.group && gate.has_shifts == up.has_shifts;
  const auto up_inputs = are_same ? gate_inputs : share_inputs<Weight, 1>(up, inputs, tokens);
  share_panels(PanelGatedProduct<Weight, Output>{gate, up, gate_inputs, up_inputs, outputs, activation}, tokens);
}

// The same of a gated layer, both of whose matrices are packed or neither is.
template <typename Weight>
void share_gated_product(const MatrixArguments& gate, const MatrixArguments& up, const InputOf<Weight>* inputs,
                         int tokens, float* outputs, Activation activation) {
  if (takes_panels<Weight>(gate, tokens))
    share_gated_panels<Weight, float>(gate, up, inputs, tokens, outputs, activation);
  else
    share_tiles(GatedProduct<Weight>{matrix_of<Weight>(gate), matrix_of<Weight>(up), inputs, outputs, activation},
                tokens);
}

// To be called by each thread after its last product.
inline void release_blocks(const MatrixArguments& matrix) {
  release_tiles();
  if (matrix.blocks != nullptr) matrix.blocks->release(true);
}

}  // namespace pando
