// Products with packed integers on processors that multiply bfloat16: each group is summed by itself, as integers times
// inputs. The sum is multiplied by the group's scale, and the sum of its inputs by the group's shift.
//
// Integers of up to 8 bits, and FP4, are exact in bfloat16, so weights are not rounded, and a table turns the bits of a
// pair into what products take. Few tokens are multiplied while integers are in registers, which costs little beside
// waiting for memory; for more, integers are unpacked once into memory that stays in the nearest cache. A result is
// summed in the same order either way. AMX and oneDNN multiply scaled and rounded weights instead: see packed.hpp.
#pragma once

#include <type_traits>
#include <vector>

#include "elementwise.hpp"
#include "packed.hpp"

namespace pando {

#if defined(__AVX512BF16__)
#define PANDO_GROUPS 1

// Tokens that are multiplied at a time, while integers are in registers and after they were unpacked.
constexpr int kGroupRows = 6, kUnpackedRows = 4;

// Tokens up to which integers stay in registers: converting those of 8 bits takes longest.
template <int Bits>
constexpr int kMostDirect = Bits == 4 ? 64 : Bits == 8 ? kGroupRows : 24;

// Whether groups of a product's weights are summed by themselves.
template <typename Weight>
bool sums_groups(const MatrixArguments& matrix) {
  return std::is_same_v<Weight, BFloat16> && matrix.bits != 0 && !uses_tiles<Weight>() && matrix.blocks == nullptr;
}

// The bfloat16 numbers of all codes, repeated up to 64 of them; of FP4 twice the numbers.
template <int Bits, bool IsE2M1>
struct CodeTable {
  alignas(64) BFloat16 numbers[64];

  explicit CodeTable(int middle) {
    constexpr float kDoubled[8] = {0, 1, 2, 3, 4, 6, 8, 12};
    for (int i = 0; i < 64; ++i) {
      const int code = i % (1 << Bits);
      const float magnitude = kDoubled[code & 7];
      from_float(IsE2M1 ? (code & 8 ? -magnitude : magnitude) : static_cast<float>(code - middle), numbers + i);
    }
  }
};

// Turns the bits of pairs of integers into pairs of bfloat16 numbers. Weights without shifts are integers around zero.
template <int Bits, bool IsE2M1>
struct PairReader {
  int middle;
  __m512i lower, upper;

  explicit PairReader(const MatrixArguments& matrix) : middle(matrix.has_shifts || IsE2M1 ? 0 : 1 << (Bits - 1)) {
    if constexpr (Bits < 8) {
      static const CodeTable<Bits, IsE2M1> plain(0), centred(1 << (Bits - 1));
      const BFloat16* numbers = (middle == 0 ? plain : centred).numbers;
      lower = _mm512_load_si512(numbers);
      upper = _mm512_load_si512(numbers + 32);
    }
  }

  __m512bh read(const PackedStep<Bits>& step, int pair) const {
    if constexpr (Bits == 8) {
      IntVector first, second;
      step.integers(pair, first, second);
      // float32 numbers that bfloat16 holds leave their lower halves empty.
      const WordVector even = (WordVector)__builtin_convertvector(first - middle, Vector) >> 16;
      return (__m512bh)(even | (WordVector)__builtin_convertvector(second - middle, Vector));
    } else {
      // Lookups ignore the bits above those of a code.
      const __m512i fours = (__m512i)step.fours(pair);
      if constexpr (Bits == 4) return (__m512bh)_mm512_permutexvar_epi16(fours, lower);
      constexpr int kFirstOrElse = 0xca;
      const __m512i codes =
          _mm512_ternarylogic_epi32(_mm512_set1_epi16(15), fours, (__m512i)step.above(pair), kFirstOrElse);
      if constexpr (Bits == 5) return (__m512bh)_mm512_permutexvar_epi16(codes, lower);
      return (__m512bh)_mm512_permutex2var_epi16(lower, codes, upper);
    }
  }
};

// Adds what a group of inputs comes to, for `Rows` tokens, to sums [Rows, kPanel].
template <int Rows, bool IsE2M1>
inline void add_group(const MatrixArguments& matrix, const uint8_t* scales, const float* input_sums, long groups,
                      const Tile<Rows>& parts, float* sums) {
#pragma GCC unroll 8
  for (int v = 0; v < kPanelVectors; ++v) {
    Vector scale = matrix.load_scale(scales, v * kLanes), shift{};
    if constexpr (IsE2M1) scale *= 0.5f;
    if (matrix.has_shifts) shift = matrix.load_scale(scales, kPanel + v * kLanes);
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row) {
      float* place = sums + row * kPanel + v * kLanes;
      Vector total = load(place) + parts[row][v] * scale;
      if (matrix.has_shifts) total += broadcast(input_sums[row * groups]) * shift;
      store(place, total);
    }
  }
}

// Multiplies `Rows` tokens with a panel while its integers are in registers; sums are [Rows, kPanel].
template <int Rows, int Bits, bool IsE2M1>
__attribute__((noinline)) void multiply_direct(const MatrixArguments& matrix, int panel, const BFloat16* inputs,
                                               const float* input_sums, float* sums) {
  const PairReader<Bits, IsE2M1> reader(matrix);
  const long depth = matrix.inputs, groups = depth / matrix.group;
  const uint8_t *steps = matrix.step(panel, 0), *scales = matrix.group_scales(panel, 0);
  alignas(64) float totals[Rows * kPanel] = {};
  for (long group = 0; group < groups; ++group, ++input_sums, scales += matrix.scale_bytes()) {
    Tile<Rows> parts = {};
    for (int i = 0; i < matrix.group; i += kStep, inputs += kStep, steps += PackedStep<Bits>::kBytes) {
      fetch<PackedStep<Bits>::kBytes>(steps);
#pragma GCC unroll 8
      for (int pair = 0; pair < kPairs; ++pair)
#pragma GCC unroll 8
        for (int v = 0; v < kPanelVectors; ++v) {
          const __m512bh weights = reader.read(PackedStep<Bits>(steps, v), pair);
#pragma GCC unroll 8
          for (int row = 0; row < Rows; ++row)
            parts[row][v] = Format<BFloat16>::add(
                parts[row][v], Format<BFloat16>::input(inputs + row * depth + 2 * pair), weights);
        }
    }
    __builtin_prefetch(scales + kFetchedScaleBytes, 0, 2);
    add_group<Rows, IsE2M1>(matrix, scales, input_sums, groups, parts, totals);
  }
  std::copy_n(totals, Rows * kPanel, sums);
}

// Some groups of a panel after they were unpacked: integers [groups, size, kPanel] in pairs, and [groups, 1 or 2, kPanel]
// scales and shifts.
struct UnpackedGroups {
  const BFloat16* integers;
  const float* scales;
  int size, count;
};

// Adds groups of `Rows` tokens to their sums; the first ones set them. `depth` and `groups` are those of all inputs.
template <int Rows, bool HasShifts>
__attribute__((noinline)) void add_groups(UnpackedGroups unpacked, const BFloat16* inputs, long depth,
                                          const float* input_sums, long groups, bool adds, float* sums) {
  Tile<Rows> totals = {};
  if (adds)
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row)
#pragma GCC unroll 8
      for (int v = 0; v < kPanelVectors; ++v) totals[row][v] = load(sums + row * kPanel + v * kLanes);
  for (; unpacked.count > 0; --unpacked.count) {
    Tile<Rows> parts = {};
    for (const BFloat16* end = inputs + unpacked.size; inputs < end; inputs += 2, unpacked.integers += 2 * kPanel) {
      __m512i pairs[kPanelVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kPanelVectors; ++v) {
        pairs[v] = _mm512_loadu_si512(unpacked.integers + v * 2 * kLanes);
        asm("" : "+v"(pairs[v]));  // GCC 12 would load it again for each row
      }
#pragma GCC unroll 8
      for (int row = 0; row < Rows; ++row) {
        const __m512bh input = Format<BFloat16>::input(inputs + row * depth);
#pragma GCC unroll 8
        for (int v = 0; v < kPanelVectors; ++v)
          parts[row][v] = Format<BFloat16>::add(parts[row][v], input, (__m512bh)pairs[v]);
      }
    }
#pragma GCC unroll 8
    for (int v = 0; v < kPanelVectors; ++v) {
      const Vector scale = load(unpacked.scales + v * kLanes);
#pragma GCC unroll 8
      for (int row = 0; row < Rows; ++row) totals[row][v] += parts[row][v] * scale;
    }
    unpacked.scales += kPanel;
    if constexpr (HasShifts) {
#pragma GCC unroll 8
      for (int row = 0; row < Rows; ++row) {
        const Vector sum = broadcast(input_sums[row * groups]);
#pragma GCC unroll 8
        for (int v = 0; v < kPanelVectors; ++v) totals[row][v] += sum * load(unpacked.scales + v * kLanes);
      }
      unpacked.scales += kPanel;
      ++input_sums;
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < Rows; ++row)
#pragma GCC unroll 8
    for (int v = 0; v < kPanelVectors; ++v) store(sums + row * kPanel + v * kLanes, totals[row][v]);
}

// Calls `function(first, rows)` with consecutive tokens, up to `Most` at a time and as evenly as may be; `rows` is a
// constant.
template <int Most, typename Function>
inline void in_rows(int tokens, Function function) {
  int tiles = (tokens + Most - 1) / Most;
  for (int first = 0; first < tokens; --tiles) {
    const int rows = (tokens - first + tiles - 1) / tiles;
    with_rows<Most>(rows, [&](auto constant) { function(first, constant); });
    first += rows;
  }
}

// Inputs [tokens, in] times one panel, [tokens, kPanel].
template <int Bits, bool IsE2M1>
__attribute__((noinline)) void group_sums(const MatrixArguments& matrix, int panel, const BFloat16* inputs,
                                          const float* input_sums, int tokens, float* sums) {
  const long depth = matrix.inputs, groups = depth / matrix.group;
  if (tokens <= kMostDirect<Bits>)
    return in_rows<kGroupRows>(tokens, [&](long first, auto rows) {
      multiply_direct<rows, Bits, IsE2M1>(matrix, panel, inputs + first * depth, input_sums + first * groups,
                                          sums + first * kPanel);
    });
  const PairReader<Bits, IsE2M1> reader(matrix);
  BFloat16* integers = unpacked_memory<BFloat16>();
  alignas(64) float scales[kUnpacked / 16 * 2 * kPanel];
  for (int begin = 0; begin < depth; begin += kUnpacked) {
    const int count = std::min(matrix.inputs - begin, kUnpacked), group = begin / matrix.group;
    const uint8_t* steps = matrix.step(panel, begin);
    for (int i = 0; i < count; i += kStep, steps += PackedStep<Bits>::kBytes) {
      fetch<PackedStep<Bits>::kBytes>(steps);
#pragma GCC unroll 8
      for (int v = 0; v < kPanelVectors; ++v) {
        const PackedStep<Bits> step(steps, v);
        BFloat16* target = integers + static_cast<long>(i) * kPanel + v * stride_of(integers);
#pragma GCC unroll 8
        for (int pair = 0; pair < kPairs; ++pair)
          _mm512_storeu_si512(target + 2 * pair * kPanel, (__m512i)reader.read(step, pair));
      }
    }
    const int size = matrix.group, found = count / size;
    const uint8_t* stored = matrix.group_scales(panel, group);
    for (int i = 0; i < found * (matrix.has_shifts ? 2 : 1) * kPanelVectors; ++i)
      store(scales + i * kLanes, matrix.load_scale(stored, i * kLanes) * (IsE2M1 ? 0.5f : 1.0f));
    const UnpackedGroups unpacked{integers, scales, size, found};
    in_rows<kUnpackedRows>(tokens, [&](long first, auto rows) {
      (matrix.has_shifts ? add_groups<rows, true> : add_groups<rows, false>)(
          unpacked, inputs + first * depth + begin, depth, input_sums + first * groups + group, groups, begin > 0,
          sums + first * kPanel);
    });
  }
}

// The sums of each group of a token's inputs, [groups].
inline void sum_inputs(const BFloat16* inputs, int width, int group, float* sums) {
  for (int start = 0; start < width; start += group) {
    Vector total{};
    for (int i = start; i < start + group; i += kLanes) total += load(inputs + i);
    sums[start / group] = sum(total);
  }
}

// The sums of groups of inputs that a product needs, [tokens, groups], or null; computed by the threads of the region
// around it. `Place` tells apart what is needed at the same time.
template <int Place>
const float* share_input_sums(const MatrixArguments& matrix, const BFloat16* inputs, int tokens) {
  if (!sums_groups<BFloat16>(matrix) || !matrix.has_shifts) return nullptr;
  static thread_local std::vector<float> own;
  const long width = matrix.inputs, groups = width / matrix.group;
  const auto sum_token = [=](int token, float* target) {
    sum_inputs(inputs + token * width, matrix.inputs, matrix.group, target + token * groups);
  };
  if (tokens * width <= kWorthThreads) {
    own.resize(tokens * groups);
    for (int token = 0; token < tokens; ++token) sum_token(token, own.data());
    return own.data();
  }
  float* shared;
#pragma omp single copyprivate(shared)
  {
    own.resize(tokens * groups);
    shared = own.data();
  }
#pragma omp for
  for (int token = 0; token < tokens; ++token) sum_token(token, shared);
  return shared;
}

#else

template <typename Weight>
constexpr bool sums_groups(const MatrixArguments&) {
  return false;
}

#endif

}  // namespace pando
