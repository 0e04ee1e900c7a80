// Weights of 4, 5, 6 or 8 bits, integers or FP4, which have a scale and a shift for each group of inputs: how they lie in
// memory, and how they are unpacked and scaled to the type that products multiply. So are weights of 16 bits that the
// processor does not multiply as they are.
//
// Weights are cut into panels as in matrix.hpp. Every one is unpacked in the same way whatever the number of tokens.
#pragma once

#include <type_traits>
#include <vector>

#include "blocks.hpp"
#include "matrix.hpp"
#include "tiles.hpp"

namespace pando {

// Inputs whose weights lie together, and their pairs.
constexpr int kStep = 16, kPairs = kStep / 2;
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
  // [panels, inputs / kStep] times what `PackedStep` reads
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
    return static_cast<const uint8_t*>(panels) + steps * 2 * bits * kPanel;
  }

  // A group's scales, and shifts if there are any, of the outputs of a panel.
  const uint8_t* group_scales(int panel, int number) const {
    return static_cast<const uint8_t*>(scales) + (static_cast<long>(panel) * (inputs / group) + number) * scale_bytes();
  }
  long scale_bytes() const {
    return (has_shifts ? 2 : 1) * kPanel * static_cast<long>(has_wide_scales ? sizeof(float) : sizeof(Float16));
  }
  // One register of what `group_scales` returned.
  Vector load_scale(const uint8_t* source, int place) const {
    return has_wide_scales ? load(reinterpret_cast<const float*>(source) + place)
                           : load(reinterpret_cast<const Float16*>(source) + place);
  }
};

// How far ahead scales are fetched.
constexpr int kFetchedScaleBytes = 2048;

// Fetches the packed integers that are needed some steps later.
template <int Bytes>
inline void fetch(const uint8_t* source) {
#pragma GCC unroll 16
  for (int i = 0; i < Bytes; i += 64) __builtin_prefetch(source + kFetchedBytes + i, 0, 2);
}

// The packed integers of kStep inputs for the outputs of one register, in words of one output each: four bits of eight
// inputs, bytes of four, or what integers have beyond four bits, of all.
//
// Of a pair of inputs, the first one's bits are in the lower half of a word, the second one's at the same place in the
// upper half, so that a shift brings the bits of a pair to where products want bfloat16 numbers.
template <int Bits>
struct PackedStep {
  static constexpr int kRows = Bits == 8 ? 4 : 2, kBytes = 2 * Bits * kPanel;
  WordVector rows[kRows];
  WordVector rest;

  PackedStep(const uint8_t* step, int v) {
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) rows[i] = load_words(step + (i * kPanel + v * kLanes) * 4);
    const uint8_t* further = step + kRows * kPanel * 4;
    if constexpr (Bits == 5) {
      const WordVector halves = __builtin_convertvector(load_halves(further + v * kLanes * 2), WordVector);
      rest = halves | halves << 8;
    }
    if constexpr (Bits == 6) rest = load_words(further + v * kLanes * 4);
  }

  // The bits of a pair's integers beyond four, at the fifth place of each half, with others beside them.
  WordVector above(int pair) const {
    const int left = Bits == 5 ? 4 - pair : 4 - 2 * pair;
    return left >= 0 ? rest << left : rest >> -left;
  }

  // Four bits of a pair's integers at the first place of each half, with others above them.
  WordVector fours(int pair) const { return rows[pair / 4] >> pair % 4 * 4; }

  // The integers of a pair of inputs.
  void integers(int pair, IntVector& first, IntVector& second) const {
    if constexpr (Bits == 8) {
      const WordVector bytes = rows[pair / 2] >> pair % 2 * 8;
      first = (IntVector)(bytes & 255);
      second = (IntVector)(bytes >> 16 & 255);
      return;
    }
    WordVector lower = fours(pair) & 15, upper = fours(pair) >> 16 & 15;
    if constexpr (Bits > 4) {
      constexpr uint32_t kMask = (1 << Bits) - 16;
      lower |= above(pair) & kMask;
      upper |= above(pair) >> 16 & kMask;
    }
    first = (IntVector)lower;
    second = (IntVector)upper;
  }

  static WordVector load_words(const uint8_t* source) {
    WordVector words;
    std::memcpy(&words, source, sizeof words);
    return words;
  }
};

// Writes kStep integers of an output of a panel to where `PackedStep` reads them.
template <int Bits>
inline void pack_step(const uint8_t* integers, int output, uint8_t* step) {
  constexpr int kRows = PackedStep<Bits>::kRows, kPairsOfRow = kPairs / kRows;
  constexpr int kLow = Bits == 8 ? 8 : 4, kHigh = Bits - kLow;
  constexpr int kHalf = Bits == 5 ? 8 : 16;  // bits between what the inputs of a pair have beyond four
  uint32_t rows[kRows] = {}, rest = 0;
  for (int pair = 0; pair < kPairs; ++pair) {
    const uint32_t first = integers[2 * pair], second = integers[2 * pair + 1], mask = (1 << kLow) - 1;
    rows[pair / kPairsOfRow] |= ((first & mask) | (second & mask) << 16) << pair % kPairsOfRow * kLow;
    rest |= (first >> kLow | second >> kLow << kHalf) << pair * kHigh;
  }
  for (int i = 0; i < kRows; ++i) std::memcpy(step + (i * kPanel + output) * 4, rows + i, 4);
  constexpr int kBytes = 2 * kHigh;
  if constexpr (kHigh > 0) std::memcpy(step + kRows * kPanel * 4 + output * kBytes, &rest, kBytes);
}

// Packs integers [outputs, inputs] into panels whose other bytes are zero.
template <int Bits>
void pack(const uint8_t* integers, int outputs, int inputs, uint8_t* panels, int threads) {
  const int steps = inputs / kStep;
#pragma omp parallel for num_threads(threads)
  for (int panel = 0; panel < panels_of(outputs); ++panel)
    for (int i = 0; i < steps; ++i)
      for (int output = 0; output < std::min(kPanel, outputs - panel * kPanel); ++output)
        pack_step<Bits>(integers + static_cast<long>(panel * kPanel + output) * inputs + i * kStep, output,
                        panels + (static_cast<long>(panel) * steps + i) * PackedStep<Bits>::kBytes);
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

#if defined(__AVX512BF16__)
inline void put_pair(Vector first, Vector second, BFloat16* target) {
  alignas(64) static constexpr uint16_t kPlaces[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
  _mm512_storeu_si512(target, _mm512_permutexvar_epi16(_mm512_load_si512(kPlaces), halves));
}
#else
inline WordVector rounded_word(Vector vector) {
  const WordVector word = (WordVector)vector;
  return word + 0x7fff + (word >> 16 & 1);
}

inline void put_pair(Vector first, Vector second, BFloat16* target) {
  const WordVector words = rounded_word(first) >> 16 | (rounded_word(second) & 0xffff0000u);
  std::memcpy(target, &words, sizeof words);
}
#endif

// How far apart registers of outputs are in unpacked weights.
inline int stride_of(const float*) { return kLanes; }
inline int stride_of(const BFloat16*) { return 2 * kLanes; }

// The scales and shifts of a group.
template <int Bits, bool IsE2M1>
struct GroupScales {
  Vector scales[kPanelVectors], shifts[kPanelVectors];

  GroupScales(const MatrixArguments& matrix, const uint8_t* source) {
    const float middle = -static_cast<float>(1 << (Bits - 1));
#pragma GCC unroll 8
    for (int v = 0; v < kPanelVectors; ++v) {
      scales[v] = matrix.load_scale(source, v * kLanes);
      shifts[v] = matrix.has_shifts ? matrix.load_scale(source, kPanel + v * kLanes) : scales[v] * middle;
      if constexpr (IsE2M1) {
        scales[v] *= 0.5f;
        shifts[v] = Vector{};
      }
    }
  }

  // The weights of a pair of inputs, for one register of outputs.
  void read(const PackedStep<Bits>& step, int pair, int v, Vector& first, Vector& second) const {
    IntVector even, odd;
    step.integers(pair, even, odd);
    if constexpr (IsE2M1) {
      even = doubled_e2m1(even);
      odd = doubled_e2m1(odd);
    }
    first = __builtin_convertvector(even, Vector) * scales[v] + shifts[v];
    second = __builtin_convertvector(odd, Vector) * scales[v] + shifts[v];
  }
};

// Unpacks inputs [begin, end) of a panel, whole groups, to `target` [inputs, kPanel], or in pairs of inputs.
template <int Bits, bool IsE2M1 = false, typename Weight>
__attribute__((noinline)) void unpack(const MatrixArguments& matrix, int panel, int begin, int end, Weight* target) {
  const uint8_t *steps = matrix.step(panel, begin), *source = matrix.group_scales(panel, begin / matrix.group);
  for (int start = begin; start < end; start += matrix.group, source += matrix.scale_bytes()) {
    const GroupScales<Bits, IsE2M1> scales(matrix, source);
    for (int i = 0; i < matrix.group; i += kStep) {
      fetch<PackedStep<Bits>::kBytes>(steps);
#pragma GCC unroll 8
      for (int v = 0; v < kPanelVectors; ++v) {
        const PackedStep<Bits> step(steps, v);
#pragma GCC unroll 8
        for (int pair = 0; pair < kPairs; ++pair) {
          Vector first, second;
          scales.read(step, pair, v, first, second);
          put_pair(first, second, target + 2 * pair * kPanel + v * stride_of(target));
        }
      }
      steps += PackedStep<Bits>::kBytes;
      target += kStep * kPanel;
    }
  }
}

// Tokens that are multiplied while float32 weights are in registers; 16 of these have no room for more.
constexpr int kScaledRows = kPanelVectors == 3 ? 4 : 2;

// Multiplies `Rows` tokens with a panel while it is unpacked; sums are [Rows, kPanel], and have the bits of a product with
// unpacked weights.
template <int Rows, int Bits, bool IsE2M1>
__attribute__((noinline)) void multiply_scaled(const MatrixArguments& matrix, int panel, const float* inputs,
                                               float* sums) {
  const long depth = matrix.inputs;
  const uint8_t *steps = matrix.step(panel, 0), *source = matrix.group_scales(panel, 0);
  Tile<Rows> totals = {};
  for (int start = 0; start < depth; start += matrix.group, source += matrix.scale_bytes()) {
    const GroupScales<Bits, IsE2M1> scales(matrix, source);
    __builtin_prefetch(source + kFetchedScaleBytes, 0, 2);
    for (int i = 0; i < matrix.group; i += kStep, steps += PackedStep<Bits>::kBytes, inputs += kStep) {
      fetch<PackedStep<Bits>::kBytes>(steps);
#pragma GCC unroll 8
      for (int pair = 0; pair < kPairs; ++pair)
#pragma GCC unroll 8
        for (int v = 0; v < kPanelVectors; ++v) {
          Vector first, second;
          scales.read(PackedStep<Bits>(steps, v), pair, v, first, second);
#pragma GCC unroll 8
          for (int row = 0; row < Rows; ++row) {
            const float* numbers = inputs + row * depth + 2 * pair;
            totals[row][v] += broadcast(numbers[0]) * first;
            totals[row][v] += broadcast(numbers[1]) * second;
          }
        }
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < Rows; ++row)
#pragma GCC unroll 8
    for (int v = 0; v < kPanelVectors; ++v) store(sums + row * kPanel + v * kLanes, totals[row][v]);
}

// Calls `function` with `rows`, from 1 to `Most`, as a constant.
template <int Most, typename Function>
inline void with_rows(int rows, Function function) {
  if (rows == Most)
    function(std::integral_constant<int, Most>{});
  else if constexpr (Most > 1)
    with_rows<Most - 1>(rows, function);
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

// The calling thread's memory for unpacked inputs of a panel; each register of it is in one line of the cache.
template <typename Number>
inline Number* unpacked_memory() {
  constexpr int kLine = 64 / sizeof(Number);
  static thread_local std::vector<Number> memory(kUnpacked * kPanel + kLine);
  const auto address = reinterpret_cast<uintptr_t>(memory.data());
  return memory.data() + (64 - address % 64) % 64 / sizeof(Number);
}

template <typename Weight>
Matrix<Weight> matrix_of(const MatrixArguments& a) {
  return {static_cast<const Weight*>(a.panels), a.bias, a.inputs, a.outputs};
}

}  // namespace pando
