/* h[m, r] += Σ_k x[m, k] · a[r, k]: the inner loop over A. */
#ifndef SLOTCAR_SHRINK_H
#define SLOTCAR_SHRINK_H

#include "ahead.h"
#include "tiles.h"

namespace slotcar {
namespace {

/* How elements are multiplied: x in float32, in the order of the lanes that A has, and A widened to it. */
template <class V, class Slot>
struct Product {
    using X = float;
    using A = Slot;
    using Sum = typename V::Reg;
    using Reg = typename V::Reg;
    static constexpr int parts = is_split<Slot> ? 2 : 1;
    static constexpr int64_t step = parts * V::width;

    static Sum zero() { return V::zero(); }
    static Sum multiply_add(Reg x, Reg a, Sum sum) { return V::fma(x, a, sum); }
    static float sum(Sum sums) { return V::sum(sums); }

    /* `count` elements of x: where they are, or in `to`, which has room for whole steps, and zeros behind them. */
    template <class T>
    static const float *arranged(const T *from, int64_t count, float *to) {
        if constexpr (sizeof(T) == sizeof(float) && !is_split<Slot>)
            if (count % step == 0) return from;
        int64_t k = 0;
        for (; k + step <= count; k += step) arrange_step(from + k, to + k);
        if (k < count) {
            T rest[step] = {};
            memcpy(rest, from + k, static_cast<size_t>(count - k) * sizeof(T));
            arrange_step(rest, to + k);
        }
        return to;
    }

    /* A part of a step. */
    static Reg load_x(const float *from, int part, int64_t) { return V::load(from + part * V::width); }

    /* The first `count` elements of a step, and zeros. */
    static void load_a(const Slot *from, int64_t count, Reg (&to)[parts]) {
        if (count < step) {
            Slot whole[step] = {};
            memcpy(whole, from, static_cast<size_t>(count) * sizeof(Slot));
            return load_a(whole, step, to);
        }
        if constexpr (is_split<Slot>)
            V::load_split(from, to);
        else
            to[0] = V::load(from);
    }

private:
    template <class T>
    static void arrange_step(const T *from, float *to) {
        Reg values[2] = {V::load(from)};
        if constexpr (is_split<Slot>) {
            values[1] = V::load(from + V::width);
            V::split(values);
            V::store(to + V::width, values[1]);
        }
        V::store(to, values[0]);
    }
};

/* h[m, r] += Σ_k x[m, k] · a[r, k] for M rows of x and all of A; of each `count` elements, from the start of a chunk on.
 */
template <class P, int M>
struct Shrink {
    const typename P::X *x[M];
    const typename P::A *a;
    int64_t a_stride, count, rank;
    float *h;  // [M, rank]
    Ahead *ahead;
};

/* sums[m, n] += x[m, k] · a[n, k] at the first `count` elements of the step at k; the fewer of both are kept. */
template <class P, int M, int N>
[[gnu::always_inline]] inline void multiply(const typename P::X *const (&x)[M], const typename P::A *const (&a)[N], int64_t k, int64_t count,
                     typename P::Sum (&sums)[M][N]) {
    if constexpr (M < N) {
        typename P::Reg x_values[M][P::parts], a_values[P::parts];
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
            for (int part = 0; part < P::parts; ++part) x_values[m][part] = P::load_x(x[m] + k, part, count);
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) {
            P::load_a(a[n] + k, count, a_values);
#pragma GCC unroll 16
            for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
                for (int part = 0; part < P::parts; ++part)
                    sums[m][n] = P::multiply_add(x_values[m][part], a_values[part], sums[m][n]);
        }
    } else {
        typename P::Reg a_values[N][P::parts];
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) P::load_a(a[n] + k, count, a_values[n]);
#pragma GCC unroll 2
        for (int part = 0; part < P::parts; ++part)
#pragma GCC unroll 16
            for (int m = 0; m < M; ++m) {
                const typename P::Reg x_value = P::load_x(x[m] + k, part, count);
#pragma GCC unroll 16
                for (int n = 0; n < N; ++n) sums[m][n] = P::multiply_add(x_value, a_values[n][part], sums[m][n]);
            }
    }
}

/* h[m, n] += Σ_k x[m, k] · a[n, k] over at most kChunk elements k. */
template <class P, int M, int N>
[[gnu::always_inline]] inline void shrink_chunk(const typename P::X *const (&x)[M], const typename P::A *const (&a)[N], int64_t count,
                         const Shrink<P, M> &work, float *h) {
    constexpr int64_t line = kLineBytes / static_cast<int64_t>(sizeof(typename P::A));
    typename P::Sum sums[M][N];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) sums[m][n] = P::zero();
    int64_t k = 0;
    for (; k + line <= count; k += line) {
        if (work.ahead) work.ahead->fetch(N);
#pragma GCC unroll 8
        for (int64_t i = k; i < k + line; i += P::step) multiply<P, M, N>(x, a, i, P::step, sums);
    }
    for (; k + P::step <= count; k += P::step) multiply<P, M, N>(x, a, k, P::step, sums);
    if (k < count) multiply<P, M, N>(x, a, k, count - k, sums);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) h[m * work.rank + n] += P::sum(sums[m][n]);
}

/* The ranks [r, r + N). */
template <class P, int M, int N>
[[gnu::always_inline]] inline void shrink_ranks(const Shrink<P, M> &work, int64_t r) {
    const typename P::X *x[M];
    const typename P::A *a[N];
    for (int64_t k = 0; k < work.count; k += kChunk) {
        for (int m = 0; m < M; ++m) x[m] = work.x[m] + k;
        for (int n = 0; n < N; ++n) a[n] = work.a + (r + n) * work.a_stride + k;
        shrink_chunk<P, M, N>(x, a, least(kChunk, work.count - k), work, work.h + r);
    }
}

/* Not inline, so that it's compiled once for all types of x. */
template <class P, int M, int kAccumulators>
[[gnu::noinline]] void shrink(const Shrink<P, M> work) {
    constexpr int N = least(kAccumulators / M, kStreams);
    int64_t r = 0;
    for (; r + N <= work.rank; r += N) shrink_ranks<P, M, N>(work, r);
    for (; r < work.rank; ++r) shrink_ranks<P, M, 1>(work, r);
}

}  // namespace
}  // namespace slotcar

#endif
