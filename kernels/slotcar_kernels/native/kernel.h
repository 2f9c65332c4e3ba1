/* One block of rows of one segment at one site: shrink, scale, expand, add base, round, write.
 *
 *     x rows, through the order      A[slot]                h                      B[slot]
 *     ┌──────panel──────┐      ┌──────panel──────┐      ┌─rank─┐            ┌──────panel──────┐
 *     │ tile of ≤4 rows │  ×   │ rank rows       │ᵀ  →  │      │     ×      │ rank rows       │  →  sums → out rows
 *     └─────────────────┘      └─────────────────┘      └──────┘            └─────────────────┘
 *
 * A block of one tile (decode) reads A and B once, in as long runs as the scratch allows; a longer one (prefill) takes
 * short panels, which stay in the L2 cache for all its tiles.
 */
#ifndef SLOTCAR_KERNEL_H
#define SLOTCAR_KERNEL_H

#include "internal.h"
#include "tiles.h"

namespace slotcar {
namespace {

constexpr int kTileRows = 4;
constexpr int64_t kPanel = 4096;  // floats of x, or of sums, of one tile: half of an L1 cache
static_assert(kPanel / kTileRows >= kChunk, "a panel has whole chunks");

struct Scratch {
    alignas(64) float h[kScratchValues];
    alignas(64) float panel[kPanel];
};

/* What the loops below need to know, with types. T is x's, S the slots'. */
template <class T, class S>
struct Block {
    const SlotcarBatch &batch;
    const SlotcarSite &site;
    const S *a, *b;
    int64_t rank, first, rows, panel;
    float scale;

    int64_t row(int64_t index) const {
        return batch.order ? batch.order[first + index] : first + index;
    }
    const T *x(int64_t index) const { return static_cast<const T *>(batch.x) + row(index) * batch.x_stride; }
    T *out(int64_t index) const { return static_cast<T *>(site.out) + row(index) * site.out_stride; }
    const T *base(int64_t index) const {
        return site.base ? static_cast<const T *>(site.base) + row(index) * site.base_stride : nullptr;
    }
};

/* `from` in float32, written to `to`, which has room for whole vectors. */
template <class V, class T>
inline const float *widened(const T *from, int64_t count, float *to) {
    int64_t k = 0;
    for (; k + V::width <= count; k += V::width) V::store(to + k, V::load(from + k));
    if (k < count) V::store(to + k, load_part<V>(from + k, count - k));
    return to;
}

/* Elements of an x row as a product takes them: where they are, or widened. */
template <class V, class X>
struct Elements {
    template <class T>
    static const X *of(const T *from, int64_t count, float *to) {
        return widened<V>(from, count, to);
    }
    static const X *of(const X *from, int64_t, float *) { return from; }
};

/* h[rows of the tile, :] += x[:, k : k + panel] A[:, k : k + panel]ᵀ */
template <class V, class P, int M, class T, class S>
void shrink_panel(const Block<T, S> &block, int64_t tile, int64_t k, Scratch &scratch) {
    const int64_t count = least(block.panel, block.batch.in_features - k);
    const typename P::X *x[M];
    for (int m = 0; m < M; ++m)
        x[m] = Elements<V, typename P::X>::of(block.x(tile + m) + k, count, scratch.panel + m * block.panel);
    float *h = scratch.h + tile * block.rank;
    shrink_rows<P, M, V::accumulators>(x, block.a + k, block.site.a_row_stride, block.rank, count, h);
}

/* out = base + sums, rounded; `out` may be `base`. */
template <class V, class T>
void finish_row(const float *sums, const T *base, T *out, int64_t count) {
    int64_t c = 0;
    for (; c + V::width <= count; c += V::width) {
        const typename V::Reg delta = V::load(sums + c);
        V::store(out + c, base ? V::add(V::load(base + c), delta) : delta);
    }
    if (c == count) return;
    const typename V::Reg delta = V::load(sums + c);
    store_part<V>(out + c, base ? V::add(load_part<V>(base + c, count - c), delta) : delta, count - c);
}

/* out = base + h B for the rows of the tile at the columns [o, o + panel) */
template <class V, int M, class T, class S>
void expand_panel(const Block<T, S> &block, int64_t tile, int64_t o, Scratch &scratch) {
    const int64_t count = least(block.panel, block.site.out_features - o);
    const int64_t group = block.rows <= kTileRows ? kStreams : block.rank;
    const float *h = scratch.h + tile * block.rank;
    expand_rows<V, S, M>(h, block.rank, group, block.b + o, block.site.b_row_stride, count, scratch.panel, block.panel);
    for (int m = 0; m < M; ++m) {
        const T *base = block.base(tile + m);
        finish_row<V>(scratch.panel + m * block.panel, base ? base + o : nullptr, block.out(tile + m) + o, count);
    }
}

/* Calls step(tile of M rows) for each tile of the block, with M as a constant. */
template <class Step>
inline void for_each_tile(int64_t rows, Step step) {
    int64_t tile = 0;
    for (; tile + kTileRows <= rows; tile += kTileRows) step(Constant<kTileRows>{}, tile);
    switch (rows - tile) {
        case 3: return step(Constant<3>{}, tile);
        case 2: return step(Constant<2>{}, tile);
        case 1: return step(Constant<1>{}, tile);
    }
}

template <class V, class P, class T, class S>
void compute_block(const Block<T, S> &block) {
    Scratch scratch;
    for (int64_t i = 0; i < block.rows * block.rank; ++i) scratch.h[i] = 0;
    for (int64_t k = 0; k < block.batch.in_features; k += block.panel)
        for_each_tile(block.rows, [&](auto rows, int64_t tile) {
            shrink_panel<V, P, decltype(rows)::value>(block, tile, k, scratch);
        });
    for (int64_t i = 0; i < block.rows * block.rank; ++i) scratch.h[i] *= block.scale;
    for (int64_t o = 0; o < block.site.out_features; o += block.panel)
        for_each_tile(block.rows, [&](auto rows, int64_t tile) {
            expand_panel<V, decltype(rows)::value>(block, tile, o, scratch);
        });
}

template <class V, class P, class T, class S>
void compute_typed(const Work &work) {
    const SlotcarSegment &segment = work.batch.segments[work.segment];
    const SlotcarSite &site = work.site;
    const int64_t rows = work.last - work.first;
    const Block<T, S> block{
        work.batch,
        site,
        static_cast<const S *>(site.a) + segment.slot * site.a_slot_stride,
        static_cast<const S *>(site.b) + segment.slot * site.b_slot_stride,
        site.ranks[work.segment],
        work.first,
        rows,
        rows <= kTileRows ? kPanel / rows / kChunk * kChunk : kChunk,
        site.scales[work.segment],
    };
    compute_block<V, P>(block);
}

template <class V, class T>
void compute_for(const Work &work) {
    switch (work.site.slot_dtype) {
        case SLOTCAR_FLOAT32: return compute_typed<V, Product<V, float>, T, float>(work);
        case SLOTCAR_FLOAT16: return compute_typed<V, Product<V, Float16>, T, Float16>(work);
        default: return compute_typed<V, Product<V, Bfloat16>, T, Bfloat16>(work);
    }
}

template <class V>
void compute(const Work &work) {
    switch (work.batch.dtype) {
        case SLOTCAR_FLOAT32: return compute_for<V, float>(work);
        case SLOTCAR_FLOAT16: return compute_for<V, Float16>(work);
        default: return compute_for<V, Bfloat16>(work);
    }
}

}  // namespace
}  // namespace slotcar

#endif
