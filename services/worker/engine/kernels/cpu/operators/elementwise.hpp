// Norms, rotary embedding and the writing of keys and values.
#pragma once

#include <cmath>
#include <type_traits>

#include "vector.hpp"

namespace pando {

// Below this many floats a second thread costs more than it brings.
constexpr long kWorthThreads = 1 << 14;

// Never inlined: wherever it is called from, it rounds alike.
__attribute__((noinline)) inline void normalise(const float* inputs, const float* weight, float epsilon, int width, float* outputs) {
  Vector squares{};
  int i = 0;
  for (; i + kLanes <= width; i += kLanes) squares += load(inputs + i) * load(inputs + i);
  float total = sum(squares);
  for (; i < width; ++i) total += inputs[i] * inputs[i];
  const float scale = 1.0f / std::sqrt(total / static_cast<float>(width) + epsilon);
  for (i = 0; i < width; ++i) outputs[i] = inputs[i] * scale * weight[i];
}

inline void rms_norm(const float* inputs, const float* weight, float epsilon, int tokens, int width, float* outputs,
                     int threads) {
#pragma omp parallel for num_threads(threads) if (static_cast<long>(tokens) * width > kWorthThreads)
  for (int token = 0; token < tokens; ++token) {
    const long start = static_cast<long>(token) * width;
    normalise(inputs + start, weight, epsilon, width, outputs + start);
  }
}

// What of a token's queries, keys and values goes where. Norm weights are null where the model has none.
struct StoreArguments {
  float* qkv;                // [tokens, (query_heads + 2 kv_heads) * head_dim]
  const float* angles;       // [positions, head_dim]: cosines, then sines
  const int64_t* positions;  // [tokens]
  const int64_t* slots;      // [tokens], page * page_size + offset
  const float* query_norm;
  const float* key_norm;
  const float* key_scales;    // [kv_heads] by which keys in FP8 are divided; null with other types
  const float* value_scales;
  float epsilon;
  int tokens, query_heads, kv_heads, head_dim, page_size, threads;
};

inline void rotate(float* head, const float* angles, int head_dim) {
  const int half = head_dim / 2;
  for (int i = 0; i < half; ++i) {
    const float first = head[i], second = head[half + i], cosine = angles[i], sine = angles[half + i];
    head[i] = first * cosine - second * sine;
    head[half + i] = second * cosine + first * sine;
  }
}

// Rounds `count` numbers, which are divided by `scale` unless it is null.
template <typename Element>
inline void round_numbers(const float* numbers, const float* scale, int count, Element* target) {
  if (scale != nullptr) {
    for (int i = 0; i < count; ++i) from_float(numbers[i] / *scale, target + i);
    return;
  }
  int i = 0;
  if constexpr (std::is_same_v<Element, BFloat16>)
    for (; i + kLanes <= count; i += kLanes) store(target + i, load(numbers + i));
  for (; i < count; ++i) from_float(numbers[i], target + i);
}

// Normalises and rotates queries and keys in place; keys [pages, kv_heads, head_dim, page_size] and values
// [pages, kv_heads, page_size, head_dim] take the new tokens. Shared by the threads of the parallel region around it.
template <typename Element>
void share_store(const StoreArguments& a, Element* keys, Element* values) {
  const long width = static_cast<long>(a.query_heads + 2 * a.kv_heads) * a.head_dim;
#pragma omp for
  for (int token = 0; token < a.tokens; ++token) {
    float* head = a.qkv + token * width;
    const float* angles = a.angles + a.positions[token] * a.head_dim;
    for (int h = 0; h < a.query_heads + a.kv_heads; ++h, head += a.head_dim) {
      const float* norm = h < a.query_heads ? a.query_norm : a.key_norm;
      if (norm != nullptr) normalise(head, norm, a.epsilon, a.head_dim, head);
      rotate(head, angles, a.head_dim);
    }
    const float* key = head - static_cast<long>(a.kv_heads) * a.head_dim;
    const float* value = head;
    const long page = a.slots[token] / a.page_size, offset = a.slots[token] % a.page_size;
    for (int h = 0; h < a.kv_heads; ++h) {
      const long start = (page * a.kv_heads + h) * a.head_dim * a.page_size;
      Element rounded[kMaxHeadDim];
      round_numbers(key + h * a.head_dim, a.key_scales ? a.key_scales + h : nullptr, a.head_dim, rounded);
      round_numbers(value + h * a.head_dim, a.value_scales ? a.value_scales + h : nullptr, a.head_dim,
                    values + start + offset * a.head_dim);
      for (int i = 0; i < a.head_dim; ++i) keys[start + static_cast<long>(i) * a.page_size + offset] = rounded[i];
    }
  }
}

template <typename Element>
void rotate_and_store(const StoreArguments& a, Element* keys, Element* values) {
  const long width = static_cast<long>(a.query_heads + 2 * a.kv_heads) * a.head_dim;
#pragma omp parallel num_threads(a.threads) if (a.tokens * width > kWorthThreads)
  share_store(a, keys, values);
}

}  // namespace pando
