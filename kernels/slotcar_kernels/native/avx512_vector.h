/* Vectors of AVX-512 (F and BW), for the files that build kernels from them. */
#ifndef SLOTCAR_AVX512_VECTOR_H
#define SLOTCAR_AVX512_VECTOR_H

#include <immintrin.h>

#include "fill.h"
#include "kernel.h"
#include "seed.h"

namespace slotcar {
namespace {

struct Avx512 {
    typedef __m512 Reg;
    static constexpr int64_t width = 16;
    static constexpr int accumulators = 16;  // of 32 registers: a tile also holds x or h, and A or B

    static Reg zero() { return _mm512_setzero_ps(); }
    static Reg broadcast(float value) { return _mm512_set1_ps(value); }

    static Reg load(const float *from) { return _mm512_loadu_ps(from); }
    static Reg load(const Float16 *from) { return _mm512_cvtph_ps(load_halves(from)); }
    static Reg load(const Bfloat16 *from) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_halves(from)), 16));
    }

    static void load_split(const Bfloat16 *from, Reg (&to)[2]) {
        const __m512i bits = _mm512_loadu_si512(from);
        to[0] = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
        to[1] = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(-65536)));
    }
    static void split(Reg (&values)[2]) {
        const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
        const Reg first = _mm512_permutex2var_ps(values[0], even, values[1]);
        values[1] = _mm512_permutex2var_ps(values[0], _mm512_or_si512(even, _mm512_set1_epi32(1)), values[1]);
        values[0] = first;
    }
    static void join(Reg (&values)[2]) {
        const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        const Reg first = _mm512_permutex2var_ps(values[0], low, values[1]);
        values[1] = _mm512_permutex2var_ps(values[0], _mm512_add_epi32(low, _mm512_set1_epi32(8)), values[1]);
        values[0] = first;
    }

    static void store(float *to, Reg values) { _mm512_storeu_ps(to, values); }
    static void store(Float16 *to, Reg values) {
        store_halves(to, _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
    static void store(Bfloat16 *to, Reg values) {
        const __m512i bits = _mm512_castps_si512(values);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        const __mmask16 nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
        const __m512i quieted = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
        store_halves(to, _mm512_cvtepi32_epi16(_mm512_srli_epi32(quieted, 16)));
    }

    static void stream_line(void *to, const void *from) {
        _mm512_stream_si512(static_cast<__m512i *>(to), _mm512_loadu_si512(from));
    }

    static Reg add(Reg a, Reg b) { return _mm512_add_ps(a, b); }
    static Reg fma(Reg a, Reg b, Reg sum) { return _mm512_fmadd_ps(a, b, sum); }
    static float sum(Reg values) { return _mm512_reduce_add_ps(values); }

private:
    static __m256i load_halves(const void *from) { return _mm256_loadu_si256(static_cast<const __m256i *>(from)); }
    static void store_halves(void *to, __m256i values) { _mm256_storeu_si256(static_cast<__m256i *>(to), values); }
};

}  // namespace
}  // namespace slotcar

#endif
