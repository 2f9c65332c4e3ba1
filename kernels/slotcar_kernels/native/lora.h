/* The C ABI of slotcar's CPU kernel: LoRA for the rows of several adapters at once, fused over shrink and expand.
 *
 *     h[row, r]   = scale_s · Σ_k x[row, k] · A_s[r, k]                 r < rank_s     (shrink)
 *     out[row, o] = base[row, o] + Σ_r h[row, r] · B_s[r, o]                           (expand)
 *
 * for the rows of slot s at one site; of an embedding h[row, r] = scale_s · A_s[id(row), r]. Without a base (DELTA) it counts as zero. Rows without a delta, which are those
 * of BASE and those of slots of rank 0, get base's bits, or zeros. Sums are in float32 and rounded once, to x's type.
 *
 * A row's bits depend on its own values and on the instruction set alone, not on how many rows share its adapter, where
 * it lies, which sites are computed with it or on how many threads: Σ_k is a sum over blocks of 1024 elements, in order,
 * each of which is one chain of multiply-adds per lane of a vector, summed across the lanes in a fixed tree; Σ_r is one
 * chain in the order of r; base is added last. The multiply-adds are fused, but for those of the portable kernel on x86.
 *
 * Strides count elements. The caller has checked that every pointer holds what shapes and strides say.
 */
#ifndef SLOTCAR_LORA_H
#define SLOTCAR_LORA_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Changes whenever a struct or the meaning of a call does. */
#define SLOTCAR_ABI_VERSION 3

enum SlotcarDtype { SLOTCAR_FLOAT32 = 0, SLOTCAR_FLOAT16 = 1, SLOTCAR_BFLOAT16 = 2 };

enum SlotcarIsa { SLOTCAR_PORTABLE = 0, SLOTCAR_AVX2 = 1, SLOTCAR_AVX512 = 2, SLOTCAR_AVX512_BF16 = 3 };

enum SlotcarStatus {
    SLOTCAR_OK = 0,
    SLOTCAR_BAD_PLAN = 1,
    SLOTCAR_BAD_RANK = 2,
    SLOTCAR_NO_SUCH_ISA = 3,
    SLOTCAR_BAD_ID = 4
};

/* The highest rank that the kernel takes: it bounds the scratch. */
#define SLOTCAR_MAX_RANK 16384

/* The positions [start, stop) of all rows that use `slot`; at sites of E experts it is slot · E + expert. */
struct SlotcarSegment {
    int64_t slot, start, stop;
};

/* Positions of BASE rows. */
struct SlotcarRange {
    int64_t start, stop;
};

struct SlotcarBatch {
    int64_t rows;
    const int64_t *order; /* [rows], position → row, or null where position = row */
    const struct SlotcarSegment *segments;
    int64_t segment_count;
    const struct SlotcarRange *base_ranges;
    int64_t base_range_count;
    const void *x; /* [rows, in_features] */
    int64_t x_stride, in_features;
    int64_t dtype; /* of x, out and base */
    const int64_t *ids; /* [rows], below in_features, in place of x: all sites are embeddings. Null elsewhere */
};

struct SlotcarSite {
    const void *a, *b; /* [S, E, R, in_features], of an embedding [S, in_features, R], and [S, E, R, out_features] */
    int64_t a_slot_stride, a_row_stride, b_slot_stride, b_row_stride;
    int64_t slot_dtype;
    const int64_t *ranks; /* one per segment */
    const float *scales;  /* one per segment */
    int64_t out_features;
    void *out; /* [rows, out_features] */
    int64_t out_stride;
    const void *base; /* [rows, out_features], null, or `out` itself */
    int64_t base_stride;
    int64_t experts; /* E; 0 is read as 1 */
    int64_t a_expert_stride, b_expert_stride;
};

/* seed[row, o] = base[row, o] + (gain_s[o] · y[row, o] + bias_s[o]) for the rows of the slots that have the vectors.
 *
 * Vectors that a slot hasn't got count as zero and are not read. Other rows get base's bits, or zeros. Each element is
 * computed in float32 by itself and rounded once, to the batch's type.
 */
struct SlotcarSeed {
    const float *vectors; /* [S, 2, out_features]: gain, bias */
    int64_t slot_stride, bias_offset;
    const int64_t *flags; /* one per segment, of SlotcarVector */
    int64_t out_features;
    void *seed; /* [rows, out_features] */
    int64_t seed_stride;
    const void *base, *y; /* [rows, out_features], or null; either may be `seed` itself, with its stride */
    int64_t base_stride, y_stride;
};

enum SlotcarVector { SLOTCAR_GAIN = 1, SLOTCAR_BIAS = 2 };

/* One array of a slot: an adapter's values in the slots' type, and behind them zeros. Nothing has gaps. */
struct SlotcarFill {
    const void *from; /* [rows, columns], or [columns, rows] where `transposed`; unused where rows is 0 */
    int64_t from_dtype, transposed;
    void *to; /* [rows + zero_rows, columns] */
    int64_t rows, columns, zero_rows;
};

#pragma GCC visibility push(default)

int64_t slotcar_abi_version(void);

/* The best instruction set that this CPU and its system run. */
int64_t slotcar_best_isa(void);

/* Computes all sites on `threads` threads, the caller's among them. Anything but SLOTCAR_OK: nothing was written. */
int64_t slotcar_lora_forward(const struct SlotcarBatch *batch, const struct SlotcarSite *sites, int64_t site_count,
                             int64_t isa, int64_t threads);

/* Writes what the LoRA of the batch's rows is added to; of the batch only the plan and the type are used. Anything but
 * SLOTCAR_OK: nothing was written.
 */
int64_t slotcar_seed(const struct SlotcarBatch *batch, const struct SlotcarSeed *seed, int64_t isa);

/* Writes arrays of one slot, finite values rounded to nearest even, those of an equal type bit for bit. What it wrote is
 * visible to whoever sees a store that the caller makes afterwards. Anything but SLOTCAR_OK: nothing was written.
 */
int64_t slotcar_fill(const struct SlotcarFill *fills, int64_t count, int64_t to_dtype, int64_t isa);

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif

#endif
