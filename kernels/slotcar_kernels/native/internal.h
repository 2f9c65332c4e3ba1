/* What dispatch.cpp and the files of the instruction sets share. */
#ifndef SLOTCAR_INTERNAL_H
#define SLOTCAR_INTERNAL_H

#include "lora.h"

namespace slotcar {

constexpr int64_t kLineBytes = 64;  // of a cache

constexpr int64_t kScratchValues = SLOTCAR_MAX_RANK;  // of h: 64 rows of rank 256, or fewer of a higher one
constexpr int64_t kBlockRows = 64;
constexpr int64_t kTileRows = 4;  // that are kept in registers

/* Elements of x whose products are summed in the lanes before these are added to h: part of the result's meaning. */
constexpr int64_t kChunk = 1024;

constexpr int64_t kPanelValues = 4096;  // floats of x, or of sums, of one tile: half of an L1 cache
static_assert(kPanelValues / kTileRows >= kChunk, "a panel has whole chunks");

/* The positions [first, last) of one segment at one site; (last - first) · rank is at most kScratchValues. */
struct Work {
    const SlotcarBatch *batch;
    const SlotcarSite *site;
    int64_t segment, first, last;
    const Work *next; /* what the same thread computes then, or null */
};

/* In an unnamed namespace as all that the files of the instruction sets share: see tiles.h. */
namespace {

[[maybe_unused]] inline int64_t rank_of(const Work &work) { return work.site->ranks[work.segment]; }

/* Where the segment's A begins, and its B, in elements. */
[[maybe_unused]] inline int64_t a_of(const Work &work) {
    const SlotcarSite &site = *work.site;
    const int64_t slot = work.batch->segments[work.segment].slot;
    if (site.experts <= 1) return slot * site.a_slot_stride;
    return slot / site.experts * site.a_slot_stride + slot % site.experts * site.a_expert_stride;
}

[[maybe_unused]] inline int64_t b_of(const Work &work) {
    const SlotcarSite &site = *work.site;
    const int64_t slot = work.batch->segments[work.segment].slot;
    if (site.experts <= 1) return slot * site.b_slot_stride;
    return slot / site.experts * site.b_slot_stride + slot % site.experts * site.b_expert_stride;
}

/* Columns of A, and of B, that are read of all ranks before the next ones are. */
[[maybe_unused]] inline int64_t panel_of(const Work &work) {
    const int64_t rows = work.last - work.first;
    return rows <= kTileRows ? kPanelValues / rows / kChunk * kChunk : kChunk;
}

}  // namespace

using Compute = void (*)(const Work &);

/* Each lies in the file of its name; all but the first are null on other processors. */
Compute portable_compute();
Compute avx2_compute();
Compute avx512_compute();
Compute avx512_bf16_compute();

using Fill = void (*)(const SlotcarFill &, int64_t to_dtype);

/* As above; the arrays of a slot need no instructions for bfloat16. */
Fill portable_fill();
Fill avx2_fill();
Fill avx512_fill();

/* The rows of one segment. */
using Seed = void (*)(const SlotcarBatch &, const SlotcarSeed &, int64_t segment);

Seed portable_seed();
Seed avx2_seed();
Seed avx512_seed();

/* Whether each position, row and slot of the batch is in its bounds. */
bool fits(const SlotcarBatch &batch);

/* [rows, features] in a batch's dtype; the stride is in elements. */
struct Rows {
    void *data;
    int64_t stride, features;
};

/* base's bits, or zeros where base is null, for the rows of `to` at the positions [start, stop); `to` may be base. */
void copy_base(const SlotcarBatch &batch, const Rows &to, const void *base, int64_t base_stride, SlotcarRange at);

/* Whether the processor and its system have the instruction set, in one of SlotcarIsa. */
bool runs(int64_t isa);

/* What needs no instructions for bfloat16, for an instruction set; null where the library or this machine hasn't got it. */
template <class Function>
Function chosen(int64_t isa, Function portable, Function avx2, Function avx512) {
    if (!runs(isa)) return nullptr;
    switch (isa) {
        case SLOTCAR_AVX2: return avx2;
        case SLOTCAR_AVX512:
        case SLOTCAR_AVX512_BF16: return avx512;
        default: return portable;
    }
}

}  // namespace slotcar

#endif
