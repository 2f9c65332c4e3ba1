/* The kernel for AVX2, FMA and F16C: x86 processors since 2013 (Haswell) and 2015 (Excavator). */
#include "internal.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include <immintrin.h>

#include "fill.h"
#include "kernel.h"
#include "seed.h"

namespace slotcar {
namespace {

struct Avx2 {
    typedef __m256 Reg;
    static constexpr int64_t width = 8;
    static constexpr int accumulators = 8;  // of 16 registers: a tile also holds x or h, and A or B

    static Reg zero() { return _mm256_setzero_ps(); }
    static Reg broadcast(float value) { return _mm256_set1_ps(value); }

    static Reg load(const float *from) { return _mm256_loadu_ps(from); }
    static Reg load(const Float16 *from) { return _mm256_cvtph_ps(load_halves(from)); }
    static Reg load(const Bfloat16 *from) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_halves(from)), 16));
    }

    static void load_split(const Bfloat16 *from, Reg (&to)[2]) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
        to[0] = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
        to[1] = _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(-65536)));
    }
    static void split(Reg (&values)[2]) {
        const __m256d even = _mm256_castps_pd(_mm256_shuffle_ps(values[0], values[1], 0x88));
        const __m256d odd = _mm256_castps_pd(_mm256_shuffle_ps(values[0], values[1], 0xdd));
        values[0] = _mm256_castpd_ps(_mm256_permute4x64_pd(even, 0xd8));
        values[1] = _mm256_castpd_ps(_mm256_permute4x64_pd(odd, 0xd8));
    }
    static void join(Reg (&values)[2]) {
        const Reg low = _mm256_unpacklo_ps(values[0], values[1]), high = _mm256_unpackhi_ps(values[0], values[1]);
        values[0] = _mm256_permute2f128_ps(low, high, 0x20);
        values[1] = _mm256_permute2f128_ps(low, high, 0x31);
    }

    static void store(float *to, Reg values) { _mm256_storeu_ps(to, values); }
    static void store(Float16 *to, Reg values) {
        store_halves(to, _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
    static void store(Bfloat16 *to, Reg values) {
        const __m256i bits = _mm256_castps_si256(values);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
        const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
        const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
        store_halves(to, _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1)));
    }

    static void stream_line(void *to, const void *from) {
        __m256i *target = static_cast<__m256i *>(to);
        const __m256i *source = static_cast<const __m256i *>(from);
        const __m256i first = _mm256_loadu_si256(source), second = _mm256_loadu_si256(source + 1);
        _mm256_stream_si256(target, first);
        _mm256_stream_si256(target + 1, second);
    }

    static Reg add(Reg a, Reg b) { return _mm256_add_ps(a, b); }
    static Reg fma(Reg a, Reg b, Reg sum) { return _mm256_fmadd_ps(a, b, sum); }

    static float sum(Reg values) {
        const __m128 four = _mm_add_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
        const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
    }

private:
    static __m128i load_halves(const void *from) { return _mm_loadu_si128(static_cast<const __m128i *>(from)); }
    static void store_halves(void *to, __m128i values) { _mm_storeu_si128(static_cast<__m128i *>(to), values); }
};

}  // namespace

Compute avx2_compute() { return compute<Avx2>; }
Fill avx2_fill() { return fill_array<Avx2>; }
Seed avx2_seed() { return seed_segment<Avx2>; }

}  // namespace slotcar

#else

slotcar::Compute slotcar::avx2_compute() { return nullptr; }
slotcar::Fill slotcar::avx2_fill() { return nullptr; }
slotcar::Seed slotcar::avx2_seed() { return nullptr; }

#endif
