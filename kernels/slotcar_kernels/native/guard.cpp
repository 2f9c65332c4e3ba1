/* The checks around a unit, in the order in which they must happen on every processor. */
#include "guard.h"

#include <errno.h>
#include <poll.h>

#include <atomic>

namespace slotcar {
namespace {

/* One load of all 8 bytes, which the compiler neither splits nor repeats.
 *
 * Acquire, so that no later load, of weights that the kernel reads, is made before it: the first check is then about
 * what is read next. On x86 that is every load; on aarch64 it is ldar. */
uint64_t word(const uint64_t *at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }

/* Whether the other end is gone, or has sent what it never sends. A signal that is pending is not its end. */
bool is_gone(int64_t socket) {
    if (socket < 0) return true;
    pollfd asked{static_cast<int>(socket), POLLIN | POLLRDHUP, 0};
    int found;
    do {
        found = poll(&asked, 1, 0);
    } while (found < 0 && errno == EINTR);
    return found != 0;
}

int64_t change(const SlotcarGuard &guard, int64_t stale) {
    const SlotcarWatch &watch = *guard.watch;
    if (word(watch.slots_closed)) return SLOTCAR_CLOSED;
    if (word(watch.epoch) != watch.wanted_epoch[0] || word(watch.epoch + 1) != watch.wanted_epoch[1])
        return SLOTCAR_OTHER_EPOCH;
    if (word(watch.region_closed)) return SLOTCAR_DISCONNECTED;
    for (int64_t i = 0; i < guard.slot_count; ++i)
        if (word(watch.mod_generations + guard.slots[i]) > guard.generation) return stale;
    return SLOTCAR_OK;
}

}  // namespace
}  // namespace slotcar

int64_t slotcar_guard_begin(const SlotcarGuard *guard, int64_t rows) {
    const int64_t found = slotcar::change(*guard, SLOTCAR_STALE_BEFORE);
    if (!found && guard->use) {
        /* Only this side writes them, and the writer of the slots only wants to see that they move: whole words, in
         * any order. */
        __atomic_store_n(guard->use + 1, guard->use[1] + 1, __ATOMIC_RELAXED);
        __atomic_store_n(guard->use + 2, guard->use[2] + static_cast<uint64_t>(rows), __ATOMIC_RELAXED);
    }
    return found;
}

int64_t slotcar_guard_end(const SlotcarGuard *guard) {
    /* Every load of weights before it is made before the loads of words behind it: were a word loaded first, the slot
     * could change between the two. x86 keeps loads in order by itself, and this only binds the compiler; on aarch64 it
     * is dmb ishld. Weights are read by plain vector loads, which may race with the writer; what they found is dropped
     * when the words say so. Other threads of the kernel have been joined, which orders their loads before this too.
     *
     * Its partner is in the writer: the word is stored before the first byte of the slot. */
    std::atomic_thread_fence(std::memory_order_acquire);
    if (const int64_t found = slotcar::change(*guard, SLOTCAR_STALE_AFTER)) return found;
    if (slotcar::is_gone(guard->watch->socket)) return SLOTCAR_GONE;
    return SLOTCAR_OK;
}

int64_t slotcar_guarded_forward(const SlotcarGuard *guard, const SlotcarBatch *batch, const SlotcarSite *sites,
                                int64_t site_count, int64_t isa, int64_t threads) {
    if (const int64_t found = slotcar_guard_begin(guard, batch->rows)) return found;
    if (const int64_t refused = slotcar_lora_forward(batch, sites, site_count, isa, threads)) return refused;
    return slotcar_guard_end(guard);
}
