/* The C ABI of reading slots that another process writes: were they, while they were read, what the mapping says?
 *
 * The writer sets a slot's mod_generation to the generation at which the slot begins to change, and only then changes
 * it. So what was read of the slots of a mapping made at generation G is right if each of their words, read *after* the
 * last of it, is at most G; a word read before only saves work. The writer also says in a word of its own when it ends
 * in order; when it is killed it says nothing, but its end of the connection is closed by the system.
 *
 * A unit is what is computed between slotcar_guard_begin and slotcar_guard_end; slotcar_guarded_forward is one. When
 * either refuses, nothing that the unit wrote may be used.
 */
#ifndef SLOTCAR_GUARD_H
#define SLOTCAR_GUARD_H

#include "lora.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Beside those of SlotcarStatus. */
enum SlotcarChange {
    SLOTCAR_STALE_BEFORE = 16, /* a slot began to change before the unit; nothing was computed */
    SLOTCAR_STALE_AFTER = 17,  /* a slot began to change meanwhile */
    SLOTCAR_CLOSED = 18,       /* the writer has ended in order */
    SLOTCAR_OTHER_EPOCH = 19,  /* the words are those of another writer */
    SLOTCAR_DISCONNECTED = 20, /* the writer has ended the connection in order */
    SLOTCAR_GONE = 21          /* the connection is over: the writer was killed, or this side has closed it */
};

/* The words of one writer, all 8 bytes wide and aligned, and the connection to it. */
struct SlotcarWatch {
    const uint64_t *epoch; /* two words */
    const uint64_t *slots_closed, *region_closed;
    const uint64_t *mod_generations; /* one per slot */
    uint64_t wanted_epoch[2];
    int64_t socket; /* the writer sends nothing there; below 0 when this side has closed it */
};

/* What one mapping reads. */
struct SlotcarGuard {
    const struct SlotcarWatch *watch;
    const int64_t *slots;
    int64_t slot_count;
    uint64_t generation;
    uint64_t *use; /* generation, units and rows so far, for the writer to see; or null */
};

#pragma GCC visibility push(default)

/* Looks at the words, and counts a unit of `rows` rows. SLOTCAR_OK or a SlotcarChange.
 *
 * It does not ask for the connection, which takes a system call: a unit that begins for nothing is only work.
 */
int64_t slotcar_guard_begin(const struct SlotcarGuard *guard, int64_t rows);

/* Looks again, once all that the caller's thread has read before is read, and whether the connection stands. SLOTCAR_OK
 * or a SlotcarChange.
 */
int64_t slotcar_guard_end(const struct SlotcarGuard *guard);

/* slotcar_lora_forward as one unit; also returns what that returns. */
int64_t slotcar_guarded_forward(const struct SlotcarGuard *guard, const struct SlotcarBatch *batch,
                                const struct SlotcarSite *sites, int64_t site_count, int64_t isa, int64_t threads);

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif

#endif
