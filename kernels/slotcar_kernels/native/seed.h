/* seed = base + (gain ⊙ y + bias), elementwise: what a LoRA with vectors is added to. */
#ifndef SLOTCAR_SEED_H
#define SLOTCAR_SEED_H

#include "internal.h"
#include "tiles.h"

namespace slotcar {
namespace {

/* One row; null stands for zeros. */
template <class T>
struct SeedRow {
    const float *gain, *bias;
    const T *base, *y;
    T *seed;
};

/* The `count` columns from c on: V::width of them, or fewer behind the last whole vector. */
template <class V, class T>
inline void seed_vector(const SeedRow<T> &row, int64_t c, int64_t count) {
    const auto load = [&](const auto *from) {
        return count == V::width ? V::load(from + c) : load_part<V>(from + c, count);
    };
    typename V::Reg sum = row.bias ? load(row.bias) : V::zero();
    if (row.gain) sum = V::fma(load(row.gain), load(row.y), sum);
    if (row.base) sum = V::add(load(row.base), sum);
    if (count == V::width)
        V::store(row.seed + c, sum);
    else
        store_part<V>(row.seed + c, sum, count);
}

template <class V, class T>
void seed_typed(const SlotcarBatch &batch, const SlotcarSeed &seed, int64_t segment) {
    const SlotcarSegment &rows = batch.segments[segment];
    const float *gain = seed.vectors + rows.slot * seed.slot_stride, *bias = gain + seed.bias_offset;
    if (!(seed.flags[segment] & SLOTCAR_GAIN) || !seed.y) gain = nullptr;
    if (!(seed.flags[segment] & SLOTCAR_BIAS)) bias = nullptr;
    for (int64_t position = rows.start; position < rows.stop; ++position) {
        const int64_t index = batch.order ? batch.order[position] : position;
        const SeedRow<T> row{gain, bias, seed.base ? static_cast<const T *>(seed.base) + index * seed.base_stride : nullptr,
                             seed.y ? static_cast<const T *>(seed.y) + index * seed.y_stride : nullptr,
                             static_cast<T *>(seed.seed) + index * seed.seed_stride};
        int64_t c = 0;
        for (; c + V::width <= seed.out_features; c += V::width) seed_vector<V>(row, c, V::width);
        if (c < seed.out_features) seed_vector<V>(row, c, seed.out_features - c);
    }
}

template <class V>
void seed_segment(const SlotcarBatch &batch, const SlotcarSeed &seed, int64_t segment) {
    switch (batch.dtype) {
        case SLOTCAR_FLOAT32: return seed_typed<V, float>(batch, seed, segment);
        case SLOTCAR_FLOAT16: return seed_typed<V, Float16>(batch, seed, segment);
        default: return seed_typed<V, Bfloat16>(batch, seed, segment);
    }
}

}  // namespace
}  // namespace slotcar

#endif
