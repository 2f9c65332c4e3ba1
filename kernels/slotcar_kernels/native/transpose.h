/* Transposes a tile of 16- or 32-bit elements, which it doesn't interpret, in blocks that vectors of 16 bytes hold. */
#ifndef SLOTCAR_TRANSPOSE_H
#define SLOTCAR_TRANSPOSE_H

#include <stdint.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace slotcar {
namespace {

/* to[r, c] = from[c, r] */
template <class T>
inline void transpose_each(const T *from, int64_t from_stride, int64_t rows, int64_t columns, T *to, int64_t to_stride) {
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < columns; ++c) to[r * to_stride + c] = from[c * from_stride + r];
}

#if defined(__SSE2__)

inline __m128i load_16_bytes(const void *from) { return _mm_loadu_si128(static_cast<const __m128i *>(from)); }
inline void store_16_bytes(void *to, __m128i values) { _mm_storeu_si128(static_cast<__m128i *>(to), values); }

/* A block of 8 x 8 elements of 16 bits. */
template <class T>
inline void transpose_block(const T *from, int64_t from_stride, T *to, int64_t to_stride, T (*)[2]) {
    __m128i in[8], pairs[8], quads[8];
#pragma GCC unroll 8
    for (int c = 0; c < 8; ++c) in[c] = load_16_bytes(from + c * from_stride);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {  // columns 2i and 2i + 1, of rows 0 to 3 and of rows 4 to 7
        pairs[i] = _mm_unpacklo_epi16(in[2 * i], in[2 * i + 1]);
        pairs[i + 4] = _mm_unpackhi_epi16(in[2 * i], in[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {  // quads[2 j + half]: four columns of rows 2 j and 2 j + 1
        const int first = i / 2 * 4 + i % 2 * 2;
        quads[i / 2 * 4 + i % 2] = _mm_unpacklo_epi32(pairs[first], pairs[first + 1]);
        quads[i / 2 * 4 + 2 + i % 2] = _mm_unpackhi_epi32(pairs[first], pairs[first + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        store_16_bytes(to + 2 * i * to_stride, _mm_unpacklo_epi64(quads[2 * i], quads[2 * i + 1]));
        store_16_bytes(to + (2 * i + 1) * to_stride, _mm_unpackhi_epi64(quads[2 * i], quads[2 * i + 1]));
    }
}

/* A block of 4 x 4 elements of 32 bits. */
template <class T>
inline void transpose_block(const T *from, int64_t from_stride, T *to, int64_t to_stride, T (*)[4]) {
    __m128i in[4];
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) in[c] = load_16_bytes(from + c * from_stride);
    const __m128i low[] = {_mm_unpacklo_epi32(in[0], in[1]), _mm_unpacklo_epi32(in[2], in[3])};
    const __m128i high[] = {_mm_unpackhi_epi32(in[0], in[1]), _mm_unpackhi_epi32(in[2], in[3])};
    store_16_bytes(to, _mm_unpacklo_epi64(low[0], low[1]));
    store_16_bytes(to + to_stride, _mm_unpackhi_epi64(low[0], low[1]));
    store_16_bytes(to + 2 * to_stride, _mm_unpacklo_epi64(high[0], high[1]));
    store_16_bytes(to + 3 * to_stride, _mm_unpackhi_epi64(high[0], high[1]));
}

/* to[r, c] = from[c, r] for `rows` r and `columns` c. */
template <class T>
inline void transpose(const T *from, int64_t from_stride, int64_t rows, int64_t columns, T *to, int64_t to_stride) {
    constexpr int64_t side = 16 / sizeof(T);
    constexpr T(*size)[sizeof(T)] = nullptr;
    int64_t c = 0;
    for (; c + side <= columns; c += side) {
        const T *column = from + c * from_stride;
        int64_t r = 0;
        for (; r + side <= rows; r += side) transpose_block(column + r, from_stride, to + r * to_stride + c, to_stride, size);
        transpose_each(column + r, from_stride, rows - r, side, to + r * to_stride + c, to_stride);
    }
    transpose_each(from + c * from_stride, from_stride, rows, columns - c, to + c, to_stride);
}

#else

template <class T>
inline void transpose(const T *from, int64_t from_stride, int64_t rows, int64_t columns, T *to, int64_t to_stride) {
    transpose_each(from, from_stride, rows, columns, to, to_stride);
}

#endif

}  // namespace
}  // namespace slotcar

#endif
