/* The C ABI: checks the plan, chooses the instruction set, splits the work over threads, writes rows without a delta. */
#include <string.h>

#include <new>
#include <system_error>
#include <thread>

#include "internal.h"

namespace slotcar {
namespace {

bool in_rows(const SlotcarBatch &batch, int64_t start, int64_t stop) {
    return 0 <= start && start <= stop && stop <= batch.rows;
}

bool ids_fit(const SlotcarBatch &batch) {
    for (int64_t i = 0; batch.ids && i < batch.rows; ++i)
        if (batch.ids[i] < 0 || batch.ids[i] >= batch.in_features) return false;
    return true;
}

bool ranks_fit(const SlotcarBatch &batch, const SlotcarSite &site) {
    for (int64_t i = 0; i < batch.segment_count; ++i)
        if (site.ranks[i] < 0 || site.ranks[i] > SLOTCAR_MAX_RANK) return false;
    return true;
}

void write_without_delta(const SlotcarBatch &batch, const SlotcarSite &site, SlotcarRange at) {
    copy_base(batch, {site.out, site.out_stride, site.out_features}, site.base, site.base_stride, at);
}

struct Call {
    const SlotcarBatch *batch;
    const SlotcarSite *sites;
    int64_t site_count;
    Compute compute;
    int64_t threads;
};

/* Rows of a piece at most: whole tiles, and so few that every thread gets some of a long segment. */
int64_t most_rows(const Call &call, const SlotcarSegment &segment, int64_t rank) {
    const int64_t tiles = (segment.stop - segment.start + kTileRows - 1) / kTileRows;
    const int64_t part = (tiles + call.threads - 1) / call.threads * kTileRows;
    const int64_t fit = rank * kBlockRows <= kScratchValues ? kBlockRows : kScratchValues / rank;
    return fit < part ? fit : part;
}

/* Calls take(work) for each piece of the call: some rows of one segment at one site. */
template <class Take>
void for_each_piece(const Call &call, Take take) {
    for (int64_t i = 0; i < call.batch->segment_count; ++i) {
        const SlotcarSegment &segment = call.batch->segments[i];
        for (int64_t s = 0; s < call.site_count; ++s) {
            const int64_t most = most_rows(call, segment, call.sites[s].ranks[i]);
            for (int64_t first = segment.start; first < segment.stop; first += most)
                take(Work{call.batch, call.sites + s, i, first, segment.stop - first < most ? segment.stop : first + most,
                          nullptr});
        }
    }
}

/* Every `threads`-th range of BASE rows and piece, from the `share`-th on. */
void compute_share(const Call &call, int64_t share) {
    const SlotcarBatch &batch = *call.batch;
    for (int64_t i = share; i < batch.base_range_count * call.site_count; i += call.threads) {
        write_without_delta(batch, call.sites[i % call.site_count], batch.base_ranges[i / call.site_count]);
    }
    int64_t piece = 0;
    Work waiting{};  // for the next one to be known, whose weights it fetches
    for_each_piece(call, [&](const Work &work) {
        if (piece++ % call.threads != share) return;
        if (!rank_of(work)) return write_without_delta(batch, *work.site, {work.first, work.last});
        waiting.next = &work;
        if (waiting.batch) call.compute(waiting);
        waiting = work;
    });
    if (waiting.batch) call.compute(waiting);
}

/* The shares of all threads; those for which the system gives no thread are computed here. */
void compute_all(const Call &call) {
    std::thread *others = call.threads > 1 ? new (std::nothrow) std::thread[call.threads - 1] : nullptr;
    int64_t started = 0;
    try {
        for (; others && started < call.threads - 1; ++started)
            others[started] = std::thread(compute_share, std::cref(call), started);
    } catch (const std::system_error &) {
    }
    for (int64_t share = started; share < call.threads; ++share) compute_share(call, share);
    for (int64_t i = 0; i < started; ++i) others[i].join();
    delete[] others;
}

/* Null where the library was built without the instruction set, or the processor or its system hasn't got it. */
Compute compute_of(int64_t isa) {
    if (!runs(isa)) return nullptr;
    switch (isa) {
        case SLOTCAR_AVX2: return avx2_compute();
        case SLOTCAR_AVX512: return avx512_compute();
        case SLOTCAR_AVX512_BF16: return avx512_bf16_compute();
        default: return portable_compute();
    }
}

}  // namespace

bool fits(const SlotcarBatch &batch) {
    for (int64_t i = 0; i < batch.segment_count; ++i) {
        const SlotcarSegment &segment = batch.segments[i];
        if (segment.slot < 0 || !in_rows(batch, segment.start, segment.stop)) return false;
    }
    for (int64_t i = 0; i < batch.base_range_count; ++i)
        if (!in_rows(batch, batch.base_ranges[i].start, batch.base_ranges[i].stop)) return false;
    for (int64_t i = 0; batch.order && i < batch.rows; ++i)
        if (batch.order[i] < 0 || batch.order[i] >= batch.rows) return false;
    return true;
}

void copy_base(const SlotcarBatch &batch, const Rows &to, const void *base, int64_t base_stride, SlotcarRange at) {
    if (base == to.data && base_stride == to.stride) return;
    const int64_t bytes = batch.dtype == SLOTCAR_FLOAT32 ? 4 : 2;
    const size_t row_bytes = static_cast<size_t>(to.features * bytes);
    for (int64_t position = at.start; position < at.stop; ++position) {
        const int64_t row = batch.order ? batch.order[position] : position;
        char *out = static_cast<char *>(to.data) + row * to.stride * bytes;
        if (base)
            memmove(out, static_cast<const char *>(base) + row * base_stride * bytes, row_bytes);
        else
            memset(out, 0, row_bytes);
    }
}

bool runs(int64_t isa) {
#if defined(__x86_64__)
    switch (isa) {
        case SLOTCAR_AVX2:
            return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
        case SLOTCAR_AVX512: return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
        case SLOTCAR_AVX512_BF16: return runs(SLOTCAR_AVX512) && __builtin_cpu_supports("avx512bf16");
    }
#endif
    return isa == SLOTCAR_PORTABLE;
}

}  // namespace slotcar

int64_t slotcar_abi_version(void) { return SLOTCAR_ABI_VERSION; }

int64_t slotcar_best_isa(void) {
    int64_t isa = SLOTCAR_AVX512_BF16;
    while (!slotcar::compute_of(isa)) --isa;
    return isa;
}

int64_t slotcar_lora_forward(const SlotcarBatch *batch, const SlotcarSite *sites, int64_t site_count, int64_t isa,
                             int64_t threads) {
    const slotcar::Compute compute = slotcar::compute_of(isa);
    if (!compute) return SLOTCAR_NO_SUCH_ISA;
    if (!slotcar::fits(*batch)) return SLOTCAR_BAD_PLAN;
    if (!slotcar::ids_fit(*batch)) return SLOTCAR_BAD_ID;
    for (int64_t s = 0; s < site_count; ++s)
        if (!slotcar::ranks_fit(*batch, sites[s])) return SLOTCAR_BAD_RANK;
    slotcar::compute_all({batch, sites, site_count, compute, threads > 1 ? threads : 1});
    return SLOTCAR_OK;
}
