// One vector register of floats, and loads into it from every element type that weights and KV may have.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pando {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

// Of the heads that attention serves.
constexpr int kMaxHeadDim = 256;

typedef float Vector __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntVector __attribute__((vector_size(kLanes * 4)));
typedef uint16_t HalfVector __attribute__((vector_size(kLanes * 2)));
typedef uint32_t WordVector __attribute__((vector_size(kLanes * 4)));
typedef uint8_t ByteVector __attribute__((vector_size(kLanes)));

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};
// e4m3 without infinities: a sign, 4 bits of exponent with bias 7, 3 of mantissa.
struct Float8 {
  uint8_t bits;
};

inline Vector broadcast(float value) { return value - Vector{}; }

inline Vector load(const float* source) {
  Vector vector;
  std::memcpy(&vector, source, sizeof vector);
  return vector;
}

inline void store(float* target, Vector vector) { std::memcpy(target, &vector, sizeof vector); }

inline HalfVector load_halves(const void* source) {
  HalfVector halves;
  std::memcpy(&halves, source, sizeof halves);
  return halves;
}

inline Vector load(const BFloat16* source) {
  return (Vector)(__builtin_convertvector(load_halves(source), WordVector) << 16);
}

inline float to_float(float value) { return value; }

inline float to_float(BFloat16 value) {
  const uint32_t word = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &word, sizeof result);
  return result;
}

// Rounds to nearest even, as torch does; NaN stays NaN.
inline void from_float(float value, BFloat16* target) {
  uint32_t word;
  std::memcpy(&word, &value, sizeof word);
  const bool is_nan = value != value;
  target->bits = is_nan ? 0x7fc0 : static_cast<uint16_t>((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

inline void from_float(float value, float* target) { *target = value; }

// The same of a register.
inline void store(BFloat16* target, Vector vector) {
  const WordVector words = (WordVector)vector;
  const WordVector rounded = words + 0x7fff + (words >> 16 & 1);
  const WordVector kept = vector == vector ? rounded : WordVector{} + 0x7fc00000;
  const HalfVector halves = __builtin_convertvector(kept >> 16, HalfVector);
  std::memcpy(target, &halves, sizeof halves);
}

#if defined(__F16C__)
inline Vector load(const Float16* source) {
#if defined(__AVX512F__)
  return (Vector)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
#else
  return (Vector)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
#endif
}
inline float to_float(Float16 value) { return _cvtsh_ss(value.bits); }
inline void from_float(float value, Float16* target) { target->bits = _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }
#else
// The compiler's own half type; converted by hardware on ARM, by a library elsewhere.
inline float to_float(Float16 value) {
  _Float16 half;
  std::memcpy(&half, &value, sizeof half);
  return static_cast<float>(half);
}
inline void from_float(float value, Float16* target) {
  const _Float16 half = static_cast<_Float16>(value);
  std::memcpy(target, &half, sizeof half);
}
inline Vector load(const Float16* source) {
  Vector vector;
  for (int lane = 0; lane < kLanes; ++lane) vector[lane] = to_float(source[lane]);
  return vector;
}
#endif

// Normal numbers get another bias; the others are multiples of 2^-9, which a conversion makes faster than the processor
// handles float32's own subnormal numbers.
inline Vector load(const Float8* source) {
  ByteVector bytes;
  std::memcpy(&bytes, source, sizeof bytes);
  const WordVector words = __builtin_convertvector(bytes, WordVector);
  const WordVector magnitude = words & 0x7f;
  const WordVector normal = (magnitude << 20) + (120u << 23);
  const WordVector small = (WordVector)(__builtin_convertvector((IntVector)magnitude, Vector) * 0x1p-9f);
  return (Vector)((magnitude < 8 ? small : normal) | (words & 0x80) << 24);
}

// Rounds to nearest even, as torch does, and limits what is too large to +-448; NaN stays NaN.
inline void from_float(float value, Float8* target) {
  uint32_t word;
  std::memcpy(&word, &value, sizeof word);
  const uint8_t sign = word >> 24 & 0x80;
  word &= 0x7fffffff;
  if (word > 0x7f800000) {
    target->bits = sign | 0x7f;
  } else if (word < 0x3c800000) {  // below 2^-6: adding 2^14 rounds to a multiple of 2^-9
    const float shifted = std::fabs(value) + 16384.0f;
    std::memcpy(&word, &shifted, sizeof word);
    target->bits = sign | static_cast<uint8_t>(word);
  } else {
    word = std::min<uint32_t>(word, 0x43e00000);  // 448
    target->bits = sign | static_cast<uint8_t>(((word + 0x7ffff + (word >> 20 & 1)) >> 20) - (120 << 3));
  }
}

inline Vector maximum(Vector lhs, Vector rhs) { return lhs > rhs ? lhs : rhs; }
inline Vector minimum(Vector lhs, Vector rhs) { return lhs < rhs ? lhs : rhs; }

// Halving adds neighbours first: the order, and so the rounding, is the same for every caller.
inline float sum(Vector vector) {
  float lanes[kLanes];
  store(lanes, vector);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  return lanes[0];
}

#if defined(__AVX512F__)
inline float largest(Vector vector) { return _mm512_reduce_max_ps((__m512)vector); }
#else
inline float largest(Vector vector) {
  float lanes[kLanes];
  store(lanes, vector);
  float result = lanes[0];
  for (int lane = 1; lane < kLanes; ++lane) result = lanes[lane] > result ? lanes[lane] : result;
  return result;
}
#endif

// e^x to about one unit in the last place for x <= 88, and 0 below -87.3, also for -infinity.
// x = n ln 2 + r with |r| <= ln 2 / 2; ln 2 in two parts keeps r exact; e^r by its Taylor series to the seventh power.
inline Vector exponential(Vector x) {
  const Vector smallest = broadcast(-87.336544f);
  const Vector clamped = minimum(maximum(x, smallest), broadcast(88.0f));
  const Vector shift = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vector shifted = clamped * 1.44269504f + shift;
  const Vector n = shifted - shift;
  const Vector r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
  Vector series = broadcast(1.0f / 5040.0f);
  series = series * r + 1.0f / 720.0f;
  series = series * r + 1.0f / 120.0f;
  series = series * r + 1.0f / 24.0f;
  series = series * r + 1.0f / 6.0f;
  series = series * r + 0.5f;
  series = series * r + 1.0f;
  series = series * r + 1.0f;
  const IntVector exponent = ((IntVector)shifted - 0x4b400000 + 127) << 23;
  const Vector result = series * (Vector)exponent;
  return x < smallest ? Vector{} : result;
}

}  // namespace pando
