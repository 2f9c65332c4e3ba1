/* What the two inner loops share: a tile of rows, kept in registers, times a few rows of A (shrink.h) or of B (expand.h).
 *
 * Both are over a vector type V, a struct of static functions over `Reg`, which holds `width` floats: zero, broadcast,
 * load (from float, Float16 or Bfloat16), store (to any of them, rounded), add, fma, sum (across the lanes, in a fixed
 * tree), stream_line (a cache line to its place, past the caches where it can); `accumulators` says how many registers a
 * tile may keep sums in. Which lanes and which order a sum has must not depend on the tile: see the promise in lora.h.
 *
 * bfloat16 weights are taken as the two halves of 32-bit lanes, which costs half of what widening each does: load_split
 * gives the even ones of 2 · width neighbours, then the odd ones, as `split` does with two vectors of neighbours; `join`
 * undoes it.
 *
 * Everything is in an unnamed namespace and uses nothing of the C++ library, so that the linker can't take the copy of a
 * function that was compiled for another instruction set.
 */
#ifndef SLOTCAR_TILES_H
#define SLOTCAR_TILES_H

#include "numbers.h"

namespace slotcar {
namespace {

template <int N>
struct Constant {
    static constexpr int value = N;
};

constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Rows of A or B that are read at a time: as many as the processor fetches ahead well. */
constexpr int64_t kStreams = 8;

template <class Slot>
constexpr bool is_split = false;
template <>
[[maybe_unused]] constexpr bool is_split<Bfloat16> = true;

/* The first `count` elements at `from`, and zeros: reads nothing behind them. */
template <class V, class T>
inline typename V::Reg load_part(const T *from, int64_t count) {
    T buffer[V::width] = {};
    memcpy(buffer, from, static_cast<size_t>(count) * sizeof(T));
    return V::load(buffer);
}

template <class V, class T>
inline void store_part(T *to, typename V::Reg values, int64_t count) {
    T buffer[V::width];
    V::store(buffer, values);
    memcpy(to, buffer, static_cast<size_t>(count) * sizeof(T));
}

}  // namespace
}  // namespace slotcar

#endif
