/* The two inner loops, over a vector type V: a tile of rows, kept in registers, times a few rows of A or of B.
 *
 * V is a struct of static functions over `Reg`, which holds `width` floats: zero, broadcast, load (from float, Float16
 * or Bfloat16), store (to any of them, rounded), add, fma, sum (across the lanes, in a fixed tree); `accumulators` says
 * how many registers a tile may keep sums in. Which lanes and which order a sum has must not depend on the tile: see the
 * promise in lora.h.
 *
 * Everything is in an unnamed namespace and uses nothing of the C++ library, so that the linker can't take the copy of a
 * function that was compiled for another instruction set.
 */
#ifndef SLOTCAR_TILES_H
#define SLOTCAR_TILES_H

#include "numbers.h"

namespace slotcar {
namespace {

/* Elements of x whose products are summed in the lanes before these are added to h: part of the result's meaning. */
constexpr int64_t kChunk = 1024;

template <int N>
struct Constant {
    static constexpr int value = N;
};

constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Rows of A or B that are read at a time: as many as the processor fetches ahead well. */
constexpr int64_t kStreams = 8;

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

/* How `shrink` multiplies: x in float32 and A widened to it. */
template <class V, class Slot>
struct Product {
    using X = float;
    using A = Slot;
    using Sum = typename V::Reg;
    using Reg = typename V::Reg;
    static constexpr int64_t step = V::width;
    static Sum zero() { return V::zero(); }
    template <class T>
    static Reg load(const T *from) {
        return V::load(from);
    }
    template <class T>
    static Reg load_part(const T *from, int64_t count) {
        return slotcar::load_part<V>(from, count);
    }
    static Sum multiply_add(Reg x, Reg a, Sum sum) { return V::fma(x, a, sum); }
    static float sum(Sum sums) { return V::sum(sums); }
};

/* sums[m, n] += x[m] · a[n] at the elements that `read` reads. */
template <class P, int M, int N, class Read>
inline void multiply(const typename P::X *const *x, const typename P::A *const *a, typename P::Sum (&sums)[M][N],
                     Read read) {
    typename P::Reg x_values[M];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) x_values[m] = read(x[m]);
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
        const typename P::Reg a_values = read(a[n]);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) sums[m][n] = P::multiply_add(x_values[m], a_values, sums[m][n]);
    }
}

/* h[m, n] += Σ_k x[m][k] · a[n, k] over at most kChunk elements k. */
template <class P, int M, int N>
inline void shrink_chunk(const typename P::X *const *x, const typename P::A *const *a, int64_t count, float *h,
                         int64_t h_stride) {
    typename P::Sum sums[M][N];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) sums[m][n] = P::zero();
    int64_t k = 0;
    for (; k + P::step <= count; k += P::step)
        multiply<P, M, N>(x, a, sums, [k](const auto *row) { return P::load(row + k); });
    if (k < count)
        multiply<P, M, N>(x, a, sums, [k, count](const auto *row) { return P::load_part(row + k, count - k); });
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) h[m * h_stride + n] += P::sum(sums[m][n]);
}

/* h[m, n] += Σ_k x[m][k] · a[n, k] over `count` elements, which begin at the start of a chunk. */
template <class P, int M, int N>
inline void shrink_tile(const typename P::X *const *x, const typename P::A *a, int64_t a_stride, int64_t count,
                        float *h, int64_t h_stride) {
    const typename P::X *x_rows[M];
    const typename P::A *a_rows[N];
    for (int64_t k = 0; k < count; k += kChunk) {
        for (int m = 0; m < M; ++m) x_rows[m] = x[m] + k;
        for (int n = 0; n < N; ++n) a_rows[n] = a + n * a_stride + k;
        shrink_chunk<P, M, N>(x_rows, a_rows, least(kChunk, count - k), h, h_stride);
    }
}

/* sums[m, c] (+)= Σ_r h[m, r] · b[r, c] for the ranks [first, last) and N vectors of columns; `part` columns, if not 0. */
template <class V, class Slot, int M, int N, bool kPart>
inline void expand_tile(const float *h, int64_t h_stride, const Slot *b, int64_t b_stride, int64_t first, int64_t last,
                        float *sums, int64_t sums_stride, int64_t part) {
    typename V::Reg values[M][N];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n)
            values[m][n] = first == 0 ? V::zero() : V::load(sums + m * sums_stride + n * V::width);
    for (int64_t r = first; r < last; ++r) {
        typename V::Reg b_values[N];
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) {
            const Slot *from = b + r * b_stride + n * V::width;
            b_values[n] = kPart ? load_part<V>(from, part) : V::load(from);
        }
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
            const typename V::Reg h_value = V::broadcast(h[m * h_stride + r]);
#pragma GCC unroll 16
            for (int n = 0; n < N; ++n) values[m][n] = V::fma(h_value, b_values[n], values[m][n]);
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) V::store(sums + m * sums_stride + n * V::width, values[m][n]);
}

/* h[m, r] += Σ_k x[m][k] · a[r, k] for all ranks r. Not inline, so that it's compiled once for all types of x. */
template <class P, int M, int kAccumulators>
[[gnu::noinline]] void shrink_rows(const typename P::X *const *x, const typename P::A *a, int64_t a_stride, int64_t rank,
                                   int64_t count, float *h) {
    constexpr int N = least(kAccumulators / M, kStreams);
    int64_t r = 0;
    for (; r + N <= rank; r += N) shrink_tile<P, M, N>(x, a + r * a_stride, a_stride, count, h + r, rank);
    for (; r < rank; ++r) shrink_tile<P, M, 1>(x, a + r * a_stride, a_stride, count, h + r, rank);
}

/* sums[m, c] = Σ_r h[m, r] · b[r, c] for all columns c, with `group` rows of b at a time. */
template <class V, class Slot, int M>
[[gnu::noinline]] void expand_rows(const float *h, int64_t rank, int64_t group, const Slot *b, int64_t b_stride,
                                   int64_t count, float *sums, int64_t sums_stride) {
    constexpr int N = V::accumulators / M;
    for (int64_t r = 0; r < rank; r += group) {
        const int64_t last = least(r + group, rank);
        int64_t c = 0;
        for (; c + N * V::width <= count; c += N * V::width)
            expand_tile<V, Slot, M, N, false>(h, rank, b + c, b_stride, r, last, sums + c, sums_stride, 0);
        for (; c + V::width <= count; c += V::width)
            expand_tile<V, Slot, M, 1, false>(h, rank, b + c, b_stride, r, last, sums + c, sums_stride, 0);
        if (c < count)
            expand_tile<V, Slot, M, 1, true>(h, rank, b + c, b_stride, r, last, sums + c, sums_stride, count - c);
    }
}

}  // namespace
}  // namespace slotcar

#endif
