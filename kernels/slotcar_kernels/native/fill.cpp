/* The C ABI of a slot's fill: chooses the instruction set, and ends when all is written where every reader sees it. */
#include "internal.h"

int64_t slotcar_fill(const SlotcarFill *fills, int64_t count, int64_t to_dtype, int64_t isa) {
    using namespace slotcar;
    const Fill fill = chosen(isa, portable_fill(), avx2_fill(), avx512_fill());
    if (!fill) return SLOTCAR_NO_SUCH_ISA;
    for (int64_t i = 0; i < count; ++i) fill(fills[i], to_dtype);
#if defined(__x86_64__)
    __builtin_ia32_sfence();  // stores past the caches are in no order with others
#endif
    __atomic_thread_fence(__ATOMIC_RELEASE);
    return SLOTCAR_OK;
}
