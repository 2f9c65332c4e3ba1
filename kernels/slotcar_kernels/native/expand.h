/* sums[m, c] = Σ_r h[m, r] · b[r, c]: the inner loop over B. */
#ifndef SLOTCAR_EXPAND_H
#define SLOTCAR_EXPAND_H

#include "ahead.h"
#include "tiles.h"

namespace slotcar {
namespace {

/* M rows of sums, over all ranks and `count` columns. */
template <class Slot>
struct Expand {
    const float *h;  // [M, rank]
    int64_t rank;
    const Slot *b;
    int64_t b_stride, count;
    float *sums;  // [M, sums_stride], with room for whole pairs of vectors
    int64_t sums_stride;
    Ahead *ahead;
};

/* Two vectors of neighbours, the first `count` of them and zeros; bfloat16 ones are split. */
template <class V, class Slot>
inline void load_pair(const Slot *from, int64_t count, typename V::Reg (&to)[2]) {
    if (count < 2 * V::width) {
        Slot whole[2 * V::width] = {};
        memcpy(whole, from, static_cast<size_t>(count) * sizeof(Slot));
        return load_pair<V>(whole, 2 * V::width, to);
    }
    if constexpr (is_split<Slot>) {
        V::load_split(from, to);
    } else {
        to[0] = V::load(from);
        to[1] = V::load(from + V::width);
    }
}

/* The first `count` of the two vectors of columns from c on, for the ranks [first, last): begun with zeros, or with what
 * the ranks before have left in `sums`.
 */
template <class V, class Slot, int M>
[[gnu::always_inline]] inline void expand_pair(const Expand<Slot> &work, int64_t c, int64_t count, int64_t first, int64_t last) {
    constexpr int64_t pair_bytes = 2 * V::width * static_cast<int64_t>(sizeof(Slot));
    typename V::Reg values[M][2], b_values[2];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i)
            values[m][i] = first == 0 ? V::zero() : V::load(work.sums + m * work.sums_stride + c + i * V::width);
    if (pair_bytes < kLineBytes && work.ahead) work.ahead->fetch((last - first) * pair_bytes / kLineBytes);
    for (int64_t r = first; r < last; ++r) {
        if (pair_bytes >= kLineBytes && work.ahead) work.ahead->fetch(pair_bytes / kLineBytes);
        load_pair<V>(work.b + r * work.b_stride + c, count, b_values);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
            const typename V::Reg h_value = V::broadcast(work.h[m * work.rank + r]);
#pragma GCC unroll 2
            for (int i = 0; i < 2; ++i) values[m][i] = V::fma(h_value, b_values[i], values[m][i]);
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
        if (is_split<Slot> && last == work.rank) V::join(values[m]);
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) V::store(work.sums + m * work.sums_stride + c + i * V::width, values[m][i]);
    }
}

/* With `group` rows of B at a time. Not inline, so that it's compiled once for all types of x. */
template <class V, class Slot, int M>
[[gnu::noinline]] void expand(const Expand<Slot> work, int64_t group) {
    constexpr int64_t pair = 2 * V::width;
    for (int64_t r = 0; r < work.rank; r += group) {
        const int64_t last = least(r + group, work.rank);
        int64_t c = 0;
        for (; c + pair <= work.count; c += pair) expand_pair<V, Slot, M>(work, c, pair, r, last);
        if (c < work.count) expand_pair<V, Slot, M>(work, c, work.count - c, r, last);
    }
}

}  // namespace
}  // namespace slotcar

#endif
