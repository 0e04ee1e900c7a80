// Products of blocks by AMX: eight registers of 16 rows of 64 bytes each, and an instruction that multiplies two of them.
//
// A row's sums are added up in the same order whatever the number of rows.
#pragma once

#include "matrix.hpp"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define PANDO_TILES 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace pando {

#ifdef PANDO_TILES

constexpr int kTileHeight = 16, kTileBytes = 64;
constexpr int kTileDepth = kTileBytes / sizeof(BFloat16);
static_assert(kPanelVectors == 3, "sums take six registers, and inputs and weights one each");

// Linux lets a process use these registers after it has asked for them (arch_prctl: ARCH_REQ_XCOMP_PERM, XTILEDATA).
inline const bool kHasTiles = syscall(SYS_arch_prctl, 0x1023, 18) == 0;

// What `ldtilecfg` reads.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t heights[16] = {};
};

// The height of the calling thread's registers of sums and inputs; 0: it has none.
inline thread_local int tile_height = 0;

inline void shape_tiles(int height) {
  if (tile_height == height) return;
  tile_height = height;
  TileShapes shapes;
  for (int i = 0; i < 8; ++i) {
    shapes.row_bytes[i] = kTileBytes;
    shapes.heights[i] = i < 7 ? height : kTileHeight;
  }
  _tile_loadconfig(&shapes);
}

// To be called by each thread after its last product: a context switch then has no tiles to save.
inline void release_tiles() {
  if (tile_height == 0) return;
  tile_height = 0;
  _tile_release();
}

// GCC does not know that the functions of tiles read and write memory: what it has not stored yet would be missed.
inline void settle_memory() { asm volatile("" ::: "memory"); }

// Multiplies kTileDepth inputs, of one or two times 16 rows `stride` apart, with their weights [inputs, kPanel].
template <int Heights, bool Fetches>
inline void add_tiles(const BFloat16* inputs, long stride, const BFloat16* weights) {
  constexpr long kPairs = kPanel * 2 * sizeof(BFloat16);
  if constexpr (Fetches) {
    const char* ahead = reinterpret_cast<const char*>(weights) + kFetchedBytes;
#pragma GCC unroll 48
    for (int i = 0; i < kTileDepth * kPanel * static_cast<int>(sizeof(BFloat16)) / 64; ++i)
      __builtin_prefetch(ahead + i * 64, 0, 2);
  }
  const long bytes = stride * static_cast<long>(sizeof(BFloat16));
  _tile_loadd(6, inputs, bytes);
  _tile_loadd(7, weights, kPairs);
  _tile_dpbf16ps(0, 6, 7);
  _tile_loadd(7, weights + kTileDepth, kPairs);
  _tile_dpbf16ps(1, 6, 7);
  _tile_loadd(7, weights + 2 * kTileDepth, kPairs);
  _tile_dpbf16ps(2, 6, 7);
  if constexpr (Heights == 2) {
    _tile_loadd(6, inputs + kTileHeight * stride, bytes);
    _tile_dpbf16ps(5, 6, 7);
    _tile_loadd(7, weights + kTileDepth, kPairs);
    _tile_dpbf16ps(4, 6, 7);
    _tile_loadd(7, weights, kPairs);
    _tile_dpbf16ps(3, 6, 7);
  }
}

template <int Heights, bool Fetches>
inline void multiply_tile_rows(const BFloat16* inputs, long stride, const BFloat16* weights, int depth, int height,
                               bool adds, float* sums) {
  constexpr long kLine = kPanel * sizeof(float);
  float* second = sums + kTileHeight * kPanel;
  settle_memory();
  if (adds) {
    _tile_loadd(0, sums, kLine);
    _tile_loadd(1, sums + kLanes, kLine);
    _tile_loadd(2, sums + 2 * kLanes, kLine);
    if constexpr (Heights == 2) {
      _tile_loadd(3, second, kLine);
      _tile_loadd(4, second + kLanes, kLine);
      _tile_loadd(5, second + 2 * kLanes, kLine);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    if constexpr (Heights == 2) {
      _tile_zero(3);
      _tile_zero(4);
      _tile_zero(5);
    }
  }
  const int whole = depth - depth % kTileDepth;
  for (int i = 0; i < whole; i += kTileDepth)
    add_tiles<Heights, Fetches>(inputs + i, stride, weights + static_cast<long>(i) * kPanel);
  if (const int rest = depth - whole) {
    // Zeros fill up the last inputs and their weights.
    alignas(64) BFloat16 last_inputs[2 * kTileHeight * kTileDepth] = {}, last_weights[kTileDepth * kPanel] = {};
    for (int row = 0; row < (Heights - 1) * kTileHeight + height; ++row)
      std::copy_n(inputs + row * stride + whole, rest, last_inputs + row * kTileDepth);
    std::copy_n(weights + static_cast<long>(whole) * kPanel, static_cast<long>(rest) * kPanel, last_weights);
    settle_memory();
    add_tiles<Heights, false>(last_inputs, kTileDepth, last_weights);
  }
  _tile_stored(0, sums, kLine);
  _tile_stored(1, sums + kLanes, kLine);
  _tile_stored(2, sums + 2 * kLanes, kLine);
  if constexpr (Heights == 2) {
    _tile_stored(3, second, kLine);
    _tile_stored(4, second + kLanes, kLine);
    _tile_stored(5, second + 2 * kLanes, kLine);
  }
  settle_memory();
}

// As `multiply_blocks` of blocks.hpp. The first rows fetch the weights that are needed next, if `fetches`: as far as memory
// is what takes the time.
inline void multiply_tiles(const BFloat16* inputs, long stride, const BFloat16* weights, int depth, int rows, bool adds,
                           float* sums, bool fetches) {
  for (int row = 0; row < rows;) {
    const BFloat16* first = inputs + row * stride;
    float* target = sums + static_cast<long>(row) * kPanel;
    const int left = rows - row;
    shape_tiles(std::min(left, kTileHeight));
    if (left >= 2 * kTileHeight) {
      if (fetches && row == 0)
        multiply_tile_rows<2, true>(first, stride, weights, depth, kTileHeight, adds, target);
      else
        multiply_tile_rows<2, false>(first, stride, weights, depth, kTileHeight, adds, target);
      row += 2 * kTileHeight;
    } else {
      const int height = std::min(left, kTileHeight);
      if (fetches && row == 0)
        multiply_tile_rows<1, true>(first, stride, weights, depth, height, adds, target);
      else
        multiply_tile_rows<1, false>(first, stride, weights, depth, height, adds, target);
      row += height;
    }
  }
}

// Whether products with weights of this type are those of tiles.
template <typename Weight>
bool uses_tiles() {
  return std::is_same_v<Weight, BFloat16> && kHasTiles;
}

#else

template <typename Weight>
constexpr bool uses_tiles() {
  return false;
}

inline void release_tiles() {}

#endif

}  // namespace pando
