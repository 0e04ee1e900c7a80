// Products with weights of 4, 5, 6 or 8 bits, integers or FP4, which have a scale and a shift for each group of inputs,
// and products of many tokens with weights of 16 bits that the processor does not multiply as they are.
//
// Weights are cut into panels as in matrix.hpp. Some inputs of a panel at a time are unpacked to the type that products
// multiply, into memory that stays in the nearest cache, and multiplied with all tokens before the next ones are. Every
// weight is unpacked, and every result summed, in the same way whatever the number of tokens.
#pragma once

#include <limits>
#include <vector>

#include "blocks.hpp"
#include "matrix.hpp"
#include "tiles.hpp"

namespace pando {

// Inputs whose weights lie together: a byte row holds four bits of two, the fifth bit of eight, or two bits of four.
constexpr int kStep = 8;
// Inputs that are unpacked at a time; a multiple of every group.
constexpr int kUnpacked = 256;

// The type that packed weights are unpacked to where others have the type `Weight`: what meets its inputs.
template <typename Weight>
using Unpacked = InputOf<Weight>;

// Whether products widen weights of this type.
template <typename Weight>
constexpr bool kIsWidened = !std::is_same_v<Unpacked<Weight>, Weight>;

// Tokens from which on a panel is widened once for all instead of in each tile. Fewer wait for memory rather than for the
// conversion, which AMD EPYCs with AVX2 do beside the sums, and Intel Xeons with AVX-512 do not.
constexpr int kWorthWidening = 48;

// What share_tiles and share_panels multiply with; `bits` is 0 if `panels` are as matrix.hpp has them.
struct MatrixArguments {
  // [panels, inputs / 8, bits, kPanel] bytes
  const void* panels;
  // [panels, inputs / group, 1 or 2, kPanel], scales and shifts
  const void* scales;
  const float* bias;
  int inputs, outputs, bits, group;
  int has_wide_scales;  // float32, else float16
  int has_shifts;       // else they are -2^(bits - 1) times the scales, or nothing for FP4
  int is_e2m1;          // four bits are FP4, else integers
  const BlockFunctions* blocks;  // null: products are those of matrix.hpp

  const uint8_t* step(int panel, int input) const {
    const long steps = static_cast<long>(panel) * (inputs / kStep) + input / kStep;
    return static_cast<const uint8_t*>(panels) + steps * bits * kPanel;
  }
};

inline IntVector load_bytes(const uint8_t* source) {
#if defined(__AVX512F__)
  return (IntVector)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
#elif defined(__AVX2__)
  return (IntVector)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(source)));
#else
  typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
  Bytes bytes;
  std::memcpy(&bytes, source, sizeof bytes);
  return __builtin_convertvector(bytes, IntVector);
#endif
}

// The integers of kStep inputs for the outputs of one register, from byte rows kPanel apart.
template <int Bits>
inline void load_integers(const uint8_t* rows, IntVector (&integers)[kStep]) {
  if constexpr (Bits == 8) {
#pragma GCC unroll 8
    for (int i = 0; i < kStep; ++i) integers[i] = load_bytes(rows + i * kPanel);
    return;
  }
#pragma GCC unroll 8
  for (int i = 0; i < kStep / 2; ++i) {
    const IntVector pair = load_bytes(rows + i * kPanel);
    integers[2 * i] = pair & 15;
    integers[2 * i + 1] = pair >> 4;
  }
  if constexpr (Bits == 5) {
    const IntVector fifth = load_bytes(rows + 4 * kPanel);
#pragma GCC unroll 8
    for (int i = 0; i < kStep; ++i) integers[i] |= (fifth >> i & 1) << 4;
  }
  if constexpr (Bits == 6) {
#pragma GCC unroll 8
    for (int half = 0; half < 2; ++half) {
      const IntVector upper = load_bytes(rows + (4 + half) * kPanel);
#pragma GCC unroll 8
      for (int i = 0; i < 4; ++i) integers[4 * half + i] |= (upper >> 2 * i & 3) << 4;
    }
  }
}

// Twice the FP4 numbers (e2m1: a sign, two bits of exponent, one of mantissa) of codes from 0 to 15.
inline IntVector doubled_e2m1(IntVector codes) {
  const IntVector exponents = codes >> 1 & 3, mantissas = codes & 1;
  const IntVector normal = (mantissas | 2) << exponents >> 1;
  const IntVector magnitudes = exponents == 0 ? mantissas : normal;
  const IntVector signs = -(codes >> 3);
  return (magnitudes ^ signs) - signs;
}

// Writes the weights of two successive inputs as products read them.
inline void put_pair(Vector first, Vector second, float* target) {
  store(target, first);
  store(target + kPanel, second);
}

inline WordVector rounded_word(Vector vector) {
  const WordVector word = (WordVector)vector;
  return word + 0x7fff + (word >> 16 & 1);
}

inline void put_pair(Vector first, Vector second, BFloat16* target) {
  const WordVector words = rounded_word(first) >> 16 | (rounded_word(second) & 0xffff0000u);
  std::memcpy(target, &words, sizeof words);
}

// How far apart registers of outputs are in unpacked weights.
inline int stride_of(const float*) { return kLanes; }
inline int stride_of(const BFloat16*) { return 2 * kLanes; }

// Unpacks inputs [begin, end) of a panel, whole groups, to `target` [inputs, kPanel], or in pairs of inputs.
template <int Bits, bool IsE2M1 = false, typename Weight>
inline void unpack(const MatrixArguments& matrix, int panel, int begin, int end, Weight* target) {
  const int group = matrix.group, parts = matrix.has_shifts ? 2 : 1;
  const float middle = -static_cast<float>(1 << (Bits - 1));
  for (int start = begin; start < end; start += group) {
    const long place = (static_cast<long>(panel) * (matrix.inputs / group) + start / group) * parts * kPanel;
    Vector scales[kPanelVectors], shifts[kPanelVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kPanelVectors; ++v) {
      if (matrix.has_wide_scales) {
        const float* source = static_cast<const float*>(matrix.scales) + place + v * kLanes;
        scales[v] = load(source);
        shifts[v] = matrix.has_shifts ? load(source + kPanel) : scales[v] * middle;
      } else {
        const Float16* source = static_cast<const Float16*>(matrix.scales) + place + v * kLanes;
        scales[v] = load(source);
        shifts[v] = matrix.has_shifts ? load(source + kPanel) : scales[v] * middle;
      }
    }
    if constexpr (IsE2M1) {
#pragma GCC unroll 8
      for (int v = 0; v < kPanelVectors; ++v) {
        scales[v] *= 0.5f;
        shifts[v] = Vector{};
      }
    }
    for (int input = start; input < start + group; input += kStep) {
      const uint8_t* rows = matrix.step(panel, input);
      Weight* first = target + static_cast<long>(input - begin) * kPanel;
#pragma GCC unroll 8
      for (int v = 0; v < kPanelVectors; ++v) {
        IntVector integers[kStep];
        load_integers<Bits>(rows + v * kLanes, integers);
        if constexpr (IsE2M1) {
#pragma GCC unroll 8
          for (int i = 0; i < kStep; ++i) integers[i] = doubled_e2m1(integers[i]);
        }
#pragma GCC unroll 8
        for (int i = 0; i < kStep; i += 2) {
          const Vector even = __builtin_convertvector(integers[i], Vector) * scales[v] + shifts[v];
          const Vector odd = __builtin_convertvector(integers[i + 1], Vector) * scales[v] + shifts[v];
          put_pair(even, odd, first + i * kPanel + v * stride_of(first));
        }
      }
    }
  }
}

// Widens inputs [begin, end) of a panel, exactly, to `target` [inputs, kPanel].
inline void widen(const BFloat16* panel, int begin, int end, float* target) {
  for (int i = begin; i < end; i += Format<BFloat16>::kInputs, target += Format<BFloat16>::kInputs * kPanel) {
#pragma GCC unroll 8
    for (int v = 0; v < kPanelVectors; ++v) {
      WordVector pairs;
      std::memcpy(&pairs, panel + static_cast<long>(i) * kPanel + v * Format<BFloat16>::kInputs * kLanes, sizeof pairs);
      put_pair((Vector)(pairs << 16), (Vector)(pairs & 0xffff0000u), target + v * kLanes);
    }
  }
}

inline void widen(const Float16* panel, int begin, int end, float* target) {
  const long first = static_cast<long>(begin) * kPanel, count = static_cast<long>(end - begin) * kPanel;
  for (long i = 0; i < count; i += kLanes) store(target + i, load(panel + first + i));
}

template <typename Weight>
Matrix<Weight> matrix_of(const MatrixArguments& a) {
  return {static_cast<const Weight*>(a.panels), a.bias, a.inputs, a.outputs};
}

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

// Unpacks inputs [begin, end) of a panel, whatever is stored.
template <typename Weight>
inline void unpack_any(const MatrixArguments& matrix, int panel, int begin, int end, Unpacked<Weight>* target) {
  switch (matrix.bits) {
    case 0:
      if constexpr (kIsWidened<Weight>) widen(matrix_of<Weight>(matrix).panel(panel), begin, end, target);
      return;
    case 4:
      if (matrix.is_e2m1) return unpack<4, true>(matrix, panel, begin, end, target);
      return unpack<4>(matrix, panel, begin, end, target);
    case 5:
      return unpack<5>(matrix, panel, begin, end, target);
    case 6:
      return unpack<6>(matrix, panel, begin, end, target);
    default:
      return unpack<8>(matrix, panel, begin, end, target);
  }
}

// Returns inputs [tokens, in] times one panel, [tokens, kPanel], in `sums`; `fetches` as in `add_products`.
template <typename Weight>
inline float* panel_sums(const MatrixArguments& matrix, const InputOf<Weight>* inputs, int tokens, int panel,
                         bool fetches, std::vector<float>& sums) {
  using Number = Unpacked<Weight>;
  static thread_local std::vector<Number> weights;
  sums.resize(static_cast<long>(tokens) * kPanel);
  if (matrix.bits == 0 && !kIsWidened<Weight>) {
    const Number* whole = matrix_of<Number>(matrix).panel(panel);
    add_products<Number>(matrix, inputs, 0, matrix.inputs, whole, tokens, sums.data(), fetches);
  } else {
    weights.resize(kUnpacked * kPanel);
    for (int begin = 0; begin < matrix.inputs; begin += kUnpacked) {
      const int end = std::min(matrix.inputs, begin + kUnpacked);
      unpack_any<Weight>(matrix, panel, begin, end, weights.data());
      add_products<Number>(matrix, inputs, begin, end - begin, weights.data(), tokens, sums.data(), false);
    }
  }
  if (matrix.bias != nullptr) {
    const int first = panel * kPanel, columns = std::min(kPanel, matrix.outputs - first);
    for (int token = 0; token < tokens; ++token)
      for (int i = 0; i < columns; ++i) sums[static_cast<long>(token) * kPanel + i] += matrix.bias[first + i];
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
  const InputOf<Weight>* inputs;
  float* outputs;
  bool accumulate;

  int width() const { return matrix.outputs; }
  int step(int tokens) const { return tokens_at_once<Weight>(matrix, tokens); }
  int cached() const { return cached_tokens<Weight>(matrix); }

  void run(int first, int tokens, int panel, bool fetches) const {
    static thread_local std::vector<float> memory;
    const float* sums =
        panel_sums<Weight>(matrix, inputs + static_cast<long>(first) * matrix.inputs, tokens, panel, fetches, memory);
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
  const InputOf<Weight>* inputs;
  Output* outputs;
  Activation activation;

  int width() const { return gate.outputs; }
  int step(int tokens) const { return tokens_at_once<Weight>(gate, tokens); }
  int cached() const { return cached_tokens<Weight>(gate); }

  void run(int first, int tokens, int panel, bool fetches) const {
    static thread_local std::vector<float> gate_memory, up_memory;
    const InputOf<Weight>* source = inputs + static_cast<long>(first) * gate.inputs;
    const float* gates = panel_sums<Weight>(gate, source, tokens, panel, fetches, gate_memory);
    const float* ups = panel_sums<Weight>(up, source, tokens, panel, fetches, up_memory);
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
    share_panels(PanelProduct<Weight>{matrix, inputs, outputs, accumulate}, tokens);
  else
    share_tiles(Product<Weight>{matrix_of<Weight>(matrix), inputs, outputs, accumulate}, tokens);
}

// The same of a gated layer, both of whose matrices are packed or neither is.
template <typename Weight>
void share_gated_product(const MatrixArguments& gate, const MatrixArguments& up, const InputOf<Weight>* inputs,
                         int tokens, float* outputs, Activation activation) {
  if (takes_panels<Weight>(gate, tokens))
    share_panels(PanelGatedProduct<Weight, float>{gate, up, inputs, outputs, activation}, tokens);
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
