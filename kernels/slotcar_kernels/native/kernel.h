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

#include "expand.h"
#include "shrink.h"

namespace slotcar {
namespace {

struct Scratch {
    alignas(64) float h[kScratchValues];
    alignas(64) float panel[kPanelValues];
    Ahead ahead;
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

/* Only the first tile reads weights that are in no cache yet. */
inline Ahead *ahead_of(Scratch &scratch, int64_t tile) { return tile ? nullptr : &scratch.ahead; }

/* h[rows of the tile, :] += x[:, k : k + panel] A[:, k : k + panel]ᵀ */
template <class V, class P, int M, class T, class S>
void shrink_panel(const Block<T, S> &block, int64_t tile, int64_t k, Scratch &scratch) {
    const int64_t count = least(block.panel, block.batch.in_features - k);
    Shrink<P, M> work{{},         block.a + k, block.site.a_row_stride,         count,
                      block.rank, scratch.h + tile * block.rank, ahead_of(scratch, tile)};
    for (int m = 0; m < M; ++m) work.x[m] = P::arranged(block.x(tile + m) + k, count, scratch.panel + m * block.panel);
    shrink<P, M, V::accumulators>(work);
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
    const Expand<S> work{scratch.h + tile * block.rank, block.rank,    block.b + o, block.site.b_row_stride, count,
                         scratch.panel,                 block.panel,   ahead_of(scratch, tile)};
    expand<V, S, M>(work, block.rows <= kTileRows ? kStreams : block.rank);
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

/* h[row, :] = A[id of the row, :]: the shrink of an embedding. */
template <class T, class S>
void gather(const Block<T, S> &block, Scratch &scratch) {
    for (int64_t i = 0; i < block.rows; ++i) {
        const S *from = block.a + block.batch.ids[block.row(i)] * block.site.a_row_stride;
        for (int64_t r = 0; r < block.rank; ++r) scratch.h[i * block.rank + r] = to_float(from[r]);
    }
}

/* h = x Aᵀ */
template <class V, class P, class T, class S>
void shrink_block(const Block<T, S> &block, Scratch &scratch) {
    for (int64_t i = 0; i < block.rows * block.rank; ++i) scratch.h[i] = 0;
    for (int64_t k = 0; k < block.batch.in_features; k += block.panel)
        for_each_tile(block.rows, [&](auto rows, int64_t tile) {
            shrink_panel<V, P, decltype(rows)::value>(block, tile, k, scratch);
        });
}

template <class V, class P, class T, class S>
void compute_block(const Block<T, S> &block, Scratch &scratch) {
    if (block.batch.ids)
        gather(block, scratch);
    else
        shrink_block<V, P>(block, scratch);
    for (int64_t i = 0; i < block.rows * block.rank; ++i) scratch.h[i] *= block.scale;
    for (int64_t o = 0; o < block.site.out_features; o += block.panel)
        for_each_tile(block.rows, [&](auto rows, int64_t tile) {
            expand_panel<V, decltype(rows)::value>(block, tile, o, scratch);
        });
}

template <class V, class P, class T, class S>
void compute_typed(const Work &work) {
    const SlotcarSite &site = *work.site;
    const Block<T, S> block{
        *work.batch,
        site,
        static_cast<const S *>(site.a) + a_of(work),
        static_cast<const S *>(site.b) + b_of(work),
        rank_of(work),
        work.first,
        work.last - work.first,
        panel_of(work),
        site.scales[work.segment],
    };
    Scratch scratch;
    if (!work.batch->ids) scratch.ahead = Ahead(work);  // the rows of A that an embedding reads are no run
    compute_block<V, P>(block, scratch);
}

template <class V, class T>
void compute_for(const Work &work) {
    switch (work.site->slot_dtype) {
        case SLOTCAR_FLOAT32: return compute_typed<V, Product<V, float>, T, float>(work);
        case SLOTCAR_FLOAT16: return compute_typed<V, Product<V, Float16>, T, Float16>(work);
        default: return compute_typed<V, Product<V, Bfloat16>, T, Bfloat16>(work);
    }
}

template <class V>
void compute(const Work &work) {
    switch (work.batch->dtype) {
        case SLOTCAR_FLOAT32: return compute_for<V, float>(work);
        case SLOTCAR_FLOAT16: return compute_for<V, Float16>(work);
        default: return compute_for<V, Bfloat16>(work);
    }
}

}  // namespace
}  // namespace slotcar

#endif
