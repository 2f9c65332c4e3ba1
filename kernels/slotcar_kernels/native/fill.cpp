/* The C ABI of a slot's fill: chooses the instruction set, and ends when all is written where every reader sees it. */
#include "internal.h"

namespace slotcar {
namespace {

/* Null where the library or this machine hasn't got the instruction set. */
Fill fill_of(int64_t isa) {
    if (!runs(isa)) return nullptr;
    switch (isa) {
        case SLOTCAR_AVX2: return avx2_fill();
        case SLOTCAR_AVX512:
        case SLOTCAR_AVX512_BF16: return avx512_fill();
        default: return portable_fill();
    }
}

}  // namespace
}  // namespace slotcar

int64_t slotcar_fill(const SlotcarFill *fills, int64_t count, int64_t to_dtype, int64_t isa) {
    const slotcar::Fill fill = slotcar::fill_of(isa);
    if (!fill) return SLOTCAR_NO_SUCH_ISA;
    for (int64_t i = 0; i < count; ++i) fill(fills[i], to_dtype);
#if defined(__x86_64__)
    __builtin_ia32_sfence();  // stores past the caches are in no order with others
#endif
    __atomic_thread_fence(__ATOMIC_RELEASE);
    return SLOTCAR_OK;
}
