/* The C ABI of seeds: chooses the instruction set, and writes the rows that have no vectors. */
#include "internal.h"

int64_t slotcar_seed(const SlotcarBatch *batch, const SlotcarSeed *seed, int64_t isa) {
    using namespace slotcar;
    const Seed write = chosen(isa, portable_seed(), avx2_seed(), avx512_seed());
    if (!write) return SLOTCAR_NO_SUCH_ISA;
    if (!fits(*batch)) return SLOTCAR_BAD_PLAN;
    const Rows to{seed->seed, seed->seed_stride, seed->out_features};
    for (int64_t i = 0; i < batch->base_range_count; ++i)
        copy_base(*batch, to, seed->base, seed->base_stride, batch->base_ranges[i]);
    for (int64_t i = 0; i < batch->segment_count; ++i)
        if (seed->flags[i])
            write(*batch, *seed, i);
        else
            copy_base(*batch, to, seed->base, seed->base_stride, {batch->segments[i].start, batch->segments[i].stop});
    return SLOTCAR_OK;
}
