/* The kernel for AVX-512 with bfloat16: where x and A are bfloat16, pairs of them are multiplied without widening.
 *
 * The instruction takes subnormal numbers as zero and rounds to nearest even after each of a pair's two additions.
 */
#include "internal.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512BF16__)

#include "avx512_vector.h"

namespace slotcar {
namespace {

struct PairProduct {
    using X = Bfloat16;
    using A = Bfloat16;
    using Sum = __m512;
    using Reg = __m512bh;
    static constexpr int parts = 1;
    static constexpr int64_t step = 32;

    static Sum zero() { return _mm512_setzero_ps(); }
    static Sum multiply_add(Reg x, Reg a, Sum sum) { return _mm512_dpbf16_ps(sum, x, a); }
    static float sum(Sum sums) { return _mm512_reduce_add_ps(sums); }

    static const Bfloat16 *arranged(const Bfloat16 *from, int64_t, float *) { return from; }
    static Reg load_x(const Bfloat16 *from, int, int64_t count) { return load(from, count); }
    static void load_a(const Bfloat16 *from, int64_t count, Reg (&to)[parts]) { to[0] = load(from, count); }

private:
    static Reg load(const Bfloat16 *from, int64_t count) {
        Bfloat16 whole[step] = {};
        memcpy(whole, from, static_cast<size_t>(count < step ? count : step) * sizeof(Bfloat16));
        Reg values;
        memcpy(&values, whole, sizeof values);
        return values;
    }
};

void compute_bf16(const Work &work) {
    if (work.batch->dtype == SLOTCAR_BFLOAT16 && work.site->slot_dtype == SLOTCAR_BFLOAT16)
        compute_typed<Avx512, PairProduct, Bfloat16, Bfloat16>(work);
    else
        avx512_compute()(work);
}

}  // namespace

Compute avx512_bf16_compute() { return compute_bf16; }

}  // namespace slotcar

#else

slotcar::Compute slotcar::avx512_bf16_compute() { return nullptr; }

#endif
