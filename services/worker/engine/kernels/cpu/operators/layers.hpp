// Successive decoder layers in one parallel region: between operators the threads meet at a barrier, and that is all.
//
// Called one by one, the operators of a single token cost a tenth of its time again: threads are woken for each, and the
// interpreter, whose lock another thread may hold, prepares the next. What is computed is the same to the last bit.
#pragma once

#include <vector>

#include "attention_tasks.hpp"
#include "elementwise.hpp"
#include "matrix.hpp"
#include "panels.hpp"

namespace pando {

// One layer of this rank, whose share is the whole model.
struct LayerArguments {
  const float* input_norm;    // [hidden]
  const float* query_norm;    // [head_dim], or null as key_norm then is
  const float* key_norm;
  const float* feed_forward_norm;  // [hidden]
  const float* sinks;         // as AttentionArguments has them
  const float* angles;        // as StoreArguments has them
  void* keys;
  void* values;
  const float* key_scales;    // as StoreArguments and AttentionArguments have them
  const float* value_scales;
  MatrixArguments qkv, output, gate, up, down;
  int window_left, is_chunked, table;  // which of the page tables, and slots, are this layer's
};

struct LayersArguments {
  const LayerArguments* layers;
  float* hidden;           // [tokens, hidden], the residual stream; overwritten
  float* normed;           // [tokens, hidden], normalised by `next_norm`, is written at the end
  const float* next_norm;  // [hidden]
  float* scratch;          // [tokens, widest input + qkv + queries + intermediate]
  const int32_t* page_tables[2];
  const int64_t* slots[2];
  int table_widths[2];
  int count, activation;
  StoreArguments store;        // what differs between layers is filled in
  AttentionArguments attention;
};

// Inputs of a product, [tokens, width]: `row(token, target)` makes one token's. If they are few, each thread makes all of
// them for itself, which takes no longer than waiting until another has; else they are shared, in `shared`.
template <typename Input, typename Row>
const Input* prepare(int tokens, int width, Input* shared, Row row) {
  if (static_cast<long>(tokens) * width <= kWorthThreads) {
    static thread_local std::vector<Input> own;
    own.resize(static_cast<long>(tokens) * width);
    for (int token = 0; token < tokens; ++token) row(token, own.data() + static_cast<long>(token) * width);
    return own.data();
  }
#pragma omp for
  for (int token = 0; token < tokens; ++token) row(token, shared + static_cast<long>(token) * width);
  return shared;
}

template <typename Input>
const Input* normalised(const float* inputs, const float* weight, float epsilon, int tokens, int width, Input* shared) {
  return prepare<Input>(tokens, width, shared, [=](int token, Input* target) {
    const float* source = inputs + static_cast<long>(token) * width;
    if constexpr (std::is_same_v<Input, float>) {
      normalise(source, weight, epsilon, width, target);
    } else {
      static thread_local std::vector<float> line;
      line.resize(width);
      normalise(source, weight, epsilon, width, line.data());
      for (int i = 0; i < width; ++i) from_float(line[i], target + i);
    }
  });
}

template <typename Input>
const Input* converted(const float* inputs, int tokens, int width, Input* shared) {
  if constexpr (std::is_same_v<Input, float>) {
    return inputs;
  } else {
    return prepare<Input>(tokens, width, shared, [=](int token, Input* target) {
      const float* source = inputs + static_cast<long>(token) * width;
      for (int i = 0; i < width; ++i) from_float(source[i], target + i);
    });
  }
}

// Inputs of the last product of a layer, [tokens, intermediate]; `gated` and `shared` have room for them.
template <typename Weight, typename Input = InputOf<Weight>>
const Input* share_gate(const LayerArguments& layer, const Input* inputs, int tokens, Activation activation,
                        float* gated, Input* shared) {
  if constexpr (std::is_same_v<Input, BFloat16>)
    if (takes_panels<Weight>(layer.gate, tokens)) {
      Input* rounded = reinterpret_cast<Input*>(gated);
      share_gated_panels<Weight, Input>(layer.gate, layer.up, inputs, tokens, rounded, activation);
      return rounded;
    }
  share_gated_product<Weight>(layer.gate, layer.up, inputs, tokens, gated, activation);
  return converted(gated, tokens, layer.down.inputs, shared);
}

// Places in the scratch memory. `inputs` is as wide as the widest of what is normalised or rounded for a product.
struct Scratch {
  float *inputs, *qkv, *attended, *gated;

  Scratch(const LayersArguments& a, int hidden) {
    const LayerArguments& layer = a.layers[0];
    const long tokens = a.store.tokens;
    inputs = a.scratch;
    qkv = inputs + tokens * std::max({hidden, layer.output.inputs, layer.down.inputs});
    attended = qkv + tokens * layer.qkv.outputs;
    gated = attended + tokens * layer.output.inputs;
  }
};

template <typename Weight, typename Element>
void share_layer(const LayersArguments& a, const LayerArguments& layer, const std::vector<AttentionTask>& tasks,
                 const Scratch& scratch) {
  using Input = InputOf<Weight>;
  const int tokens = a.store.tokens, hidden = layer.qkv.inputs;
  const float epsilon = a.store.epsilon;
  Input* shared = reinterpret_cast<Input*>(scratch.inputs);
  StoreArguments store = a.store;
  store.qkv = scratch.qkv;
  store.angles = layer.angles;
  store.slots = a.slots[layer.table];
  store.query_norm = layer.query_norm;
  store.key_norm = layer.key_norm;
  store.key_scales = layer.key_scales;
  store.value_scales = layer.value_scales;
  AttentionArguments attention = a.attention;
  attention.queries = scratch.qkv;
  attention.outputs = scratch.attended;
  attention.page_table = a.page_tables[layer.table];
  attention.table_width = a.table_widths[layer.table];
  attention.window_left = layer.window_left;
  attention.is_chunked = layer.is_chunked;
  attention.sinks = layer.sinks;
  attention.key_scales = layer.key_scales;
  attention.value_scales = layer.value_scales;

  const Input* inputs = normalised(a.hidden, layer.input_norm, epsilon, tokens, hidden, shared);
  share_product<Weight>(layer.qkv, inputs, tokens, scratch.qkv, false);
  share_store(store, static_cast<Element*>(layer.keys), static_cast<Element*>(layer.values));
  // oneDNN and attention shape the tile registers each in their own way.
  const bool is_mixed = attends_by_tiles<Element>() && layer.qkv.blocks != nullptr;
  if (is_mixed) release_blocks(layer.qkv);
  share_tasks(attention, tasks, static_cast<const Element*>(layer.keys), static_cast<const Element*>(layer.values));
  if (is_mixed) release_tiles();
  inputs = converted(scratch.attended, tokens, layer.output.inputs, shared);
  share_product<Weight>(layer.output, inputs, tokens, a.hidden, true);
  inputs = normalised(a.hidden, layer.feed_forward_norm, epsilon, tokens, hidden, shared);
  inputs = share_gate<Weight>(layer, inputs, tokens, static_cast<Activation>(a.activation), scratch.gated, shared);
  share_product<Weight>(layer.down, inputs, tokens, a.hidden, true);
}

template <typename Weight, typename Element>
void run_layers(const LayersArguments& a) {
  const std::vector<AttentionTask> tasks = split_tasks<Element>(a.attention);
  const int tokens = a.store.tokens, hidden = a.layers[0].qkv.inputs;
  const Scratch scratch(a, hidden);
#pragma omp parallel num_threads(a.store.threads)
  {
    for (int i = 0; i < a.count; ++i) share_layer<Weight, Element>(a, a.layers[i], tasks, scratch);
    release_blocks(a.layers[0].qkv);
#pragma omp for
    for (int token = 0; token < tokens; ++token)
      normalise(a.hidden + static_cast<long>(token) * hidden, a.next_norm, a.store.epsilon, hidden,
                a.normed + static_cast<long>(token) * hidden);
  }
}

}  // namespace pando
