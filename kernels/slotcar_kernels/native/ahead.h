/* Weights that will be read soon, on their way from memory to the L2 cache.
 *
 *     piece │ A . . . . read . . . . . . . . . . . │ B . . . . . . . . . . . . . │ A of the next piece
 *                         └───── kAheadBytes ────┘ fetched
 *
 * A tile reads some columns of several rows at once, which the processor's own prefetchers take for as many short runs.
 * This asks for the same bytes in one long run, and goes on where A, B or the piece end.
 */
#ifndef SLOTCAR_AHEAD_H
#define SLOTCAR_AHEAD_H

#include "internal.h"

namespace slotcar {
namespace {

constexpr int64_t kAheadBytes = 160 << 10;  // a part of an L2 cache

/* A or B of a piece, in the order in which a tile reads it: panel after panel of columns, in each row after row. */
struct Panels {
    const char *start;
    int64_t rows, row_stride, row_bytes, panel_bytes;
};

inline int64_t slot_item_bytes(const Work &work) { return work.site->slot_dtype == SLOTCAR_FLOAT32 ? 4 : 2; }

inline Panels panels_of_a(const Work &work) {
    const SlotcarSite &site = *work.site;
    const int64_t size = slot_item_bytes(work);
    return {static_cast<const char *>(site.a) + a_of(work) * size, rank_of(work), site.a_row_stride * size,
            work.batch->in_features * size, panel_of(work) * size};
}

inline Panels panels_of_b(const Work &work) {
    const SlotcarSite &site = *work.site;
    const int64_t size = slot_item_bytes(work);
    return {static_cast<const char *>(site.b) + b_of(work) * size, rank_of(work), site.b_row_stride * size,
            site.out_features * size, panel_of(work) * size};
}

class Ahead {
public:
    /* Fetches nothing, ever. */
    Ahead() = default;

    /* Fetches what a piece of work and the next one read, from kAheadBytes behind the start of A, or from B. */
    explicit Ahead(const Work &work)
        : panels_{panels_of_a(work), panels_of_b(work), work.next ? panels_of_a(*work.next) : Panels{}}, which_(0) {
        begin_run();
        for (int64_t skipped = 0; skipped < kAheadBytes && which_ == 0; next_run())
            skipped += static_cast<int64_t>(end_ - at_);
    }

    /* To be called when so many lines of the weights are read. */
    void fetch(int64_t lines) {
#pragma GCC unroll 8
        for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(reinterpret_cast<const void *>(at_ + i * step_), 0, 2);
        at_ += static_cast<uintptr_t>(lines) * step_;
        if (at_ >= end_) next_run();
    }

private:
    static constexpr int kPanels = 3;

    [[gnu::noinline]] void next_run() {
        if (which_ < kPanels && ++row_ == panels_[which_].rows) {
            row_ = 0;
            column_ += panels_[which_].panel_bytes;
        }
        begin_run();
    }

    /* What a panel has of a row: memory without gaps. Behind the last one steps are 0. */
    void begin_run() {
        while (which_ < kPanels && column_ >= panels_[which_].row_bytes) {
            ++which_;
            column_ = 0;
        }
        step_ = which_ < kPanels ? kLineBytes : 0;
        end_ = UINTPTR_MAX;
        if (!step_) return;
        const Panels &panels = panels_[which_];
        const int64_t left = panels.row_bytes - column_;
        at_ = reinterpret_cast<uintptr_t>(panels.start + row_ * panels.row_stride + column_);
        end_ = at_ + static_cast<uintptr_t>(left < panels.panel_bytes ? left : panels.panel_bytes);
    }

    Panels panels_[kPanels] = {};
    int which_ = kPanels;
    int64_t row_ = 0, column_ = 0;
    uintptr_t at_ = 0, end_ = UINTPTR_MAX, step_ = 0;
};

}  // namespace
}  // namespace slotcar

#endif
