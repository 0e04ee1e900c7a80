// Products of blocks by oneDNN, through the functions that libtorch_cpu exports (at::native::cpublas::brgemm).
//
// oneDNN generates code for the processor that it finds, AMX tiles included, and reads panels as matrix.hpp lays them out.
#pragma once

#include "matrix.hpp"

namespace pando {

// sums [rows, columns] = (sums if adds) + inputs [rows, depth] x weights [depth, columns]; strides are in numbers, or in
// pairs of weights.
template <typename Number>
using BlockFunction = void (*)(int64_t rows, int64_t columns, int64_t depth, int64_t input_stride,
                               int64_t weight_stride, int64_t sum_stride, bool adds, const Number* inputs,
                               const Number* weights, float* sums, bool is_in_pairs);

struct BlockFunctions {
  BlockFunction<float> multiply_float32;
  BlockFunction<BFloat16> multiply_bfloat16;
  void (*release)(bool is_in_pairs);  // gives up the calling thread's tile registers
};

// Rows of a product that are computed at a time, so that their sums stay in the nearest cache.
constexpr int kBlockRows = 64;

// Whether inputs have the type of the weights, as blocks need it.
template <typename Weight>
constexpr bool kHasBlocks = std::is_same_v<InputOf<Weight>, Weight>;

template <typename Weight>
inline auto block_function(const BlockFunctions& functions) {
  if constexpr (std::is_same_v<Weight, BFloat16>)
    return functions.multiply_bfloat16;
  else
    return functions.multiply_float32;
}

// Adds the products of `depth` inputs, of rows `stride` apart, with weights [depth, kPanel] to sums [rows, kPanel], or
// sets the sums. oneDNN generates a function for each number of rows: these are cut so that there are 19 of them.
template <typename Weight>
inline void multiply_blocks(const BlockFunctions& functions, const Weight* inputs, long stride, const Weight* weights,
                            int depth, int rows, bool adds, float* sums) {
  constexpr int kTileOfRows = 16;
  for (int row = 0; row < rows;) {
    const int left = rows - row;
    const int count = left >= kBlockRows ? kBlockRows : left >= kTileOfRows ? left - left % kTileOfRows : left;
    block_function<Weight>(functions)(count, kPanel, depth, stride, kPanel, kPanel, adds,
                                      inputs + static_cast<long>(row) * stride, weights,
                                      sums + static_cast<long>(row) * kPanel, Format<Weight>::kInputs == 2);
    row += count;
  }
}

}  // namespace pando
