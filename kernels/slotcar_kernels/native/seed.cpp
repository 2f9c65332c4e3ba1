/* The C ABI of seeds: chooses the instruction set, and writes the rows that have no vectors. */
#include <string.h>

#include "internal.h"

namespace slotcar {
namespace {

/* Null where the library or this machine hasn't got the instruction set. */
Seed seed_of(int64_t isa) {
    if (!runs(isa)) return nullptr;
    switch (isa) {
        case SLOTCAR_AVX2: return avx2_seed();
        case SLOTCAR_AVX512:
        case SLOTCAR_AVX512_BF16: return avx512_seed();
        default: return portable_seed();
    }
}

/* base's bits, or zeros, for the rows at the positions [start, stop). */
void copy_base(const SlotcarBatch &batch, const SlotcarSeed &seed, int64_t start, int64_t stop) {
    const int64_t bytes = batch.dtype == SLOTCAR_FLOAT32 ? 4 : 2;
    const size_t row_bytes = static_cast<size_t>(seed.out_features * bytes);
    if (seed.base == seed.seed) return;
    for (int64_t position = start; position < stop; ++position) {
        const int64_t row = batch.order ? batch.order[position] : position;
        char *to = static_cast<char *>(seed.seed) + row * seed.seed_stride * bytes;
        if (seed.base)
            memcpy(to, static_cast<const char *>(seed.base) + row * seed.base_stride * bytes, row_bytes);
        else
            memset(to, 0, row_bytes);
    }
}

}  // namespace
}  // namespace slotcar

int64_t slotcar_seed(const SlotcarBatch *batch, const SlotcarSeed *seed, int64_t isa) {
    const slotcar::Seed write = slotcar::seed_of(isa);
    if (!write) return SLOTCAR_NO_SUCH_ISA;
    if (!slotcar::fits(*batch)) return SLOTCAR_BAD_PLAN;
    for (int64_t i = 0; i < batch->base_range_count; ++i)
        slotcar::copy_base(*batch, *seed, batch->base_ranges[i].start, batch->base_ranges[i].stop);
    for (int64_t i = 0; i < batch->segment_count; ++i)
        if (seed->flags[i])
            write(*batch, *seed, i);
        else
            slotcar::copy_base(*batch, *seed, batch->segments[i].start, batch->segments[i].stop);
    return SLOTCAR_OK;
}
