"""Weakenings of slotcar by a line, each with the test that must catch it.

`old` stands once in `file`, and `new` takes its place. A mutant that no longer applies is a failure: whoever moves the
line moves the mutant with it.
"""

from __future__ import annotations

from dataclasses import dataclass

CORE = "sidecar/slotcar_sidecar/core"
CACHE = "sidecar/slotcar_sidecar/cache"
STORE = "sidecar/slotcar_sidecar/store"
CLIENT = "clients/slotcar_client"
CACHE_STEPS = "tests/unit/test_cache.py"
READERS = "tests/unit/test_readers.py"
UNLOADS = "tests/unit/test_unloads.py"
MAPPINGS = "tests/unit/test_mappings.py"
WAITING = "tests/unit/test_waiting.py"
HOLDS = "tests/unit/test_holds.py"
RESERVATIONS = "tests/unit/test_reservations.py"
MUSEUM = "tests/unit/museum"


@dataclass(frozen=True)
class Mutant:
    """`test` is the node id that must fail. `also` is a second replacement, where one line is not enough."""

    name: str
    file: str
    old: str
    new: str
    test: str
    also: tuple[str, str] | None = None

    def apply(self, text: str) -> str:
        """The file's text with the weakening."""
        for old, new in filter(None, ((self.old, self.new), self.also)):
            assert text.count(old) == 1, f"mutant {self.name!r}: {old!r} is {text.count(old)} times in {self.file}"
            text = text.replace(old, new)
        return text


MUTANTS = (
    Mutant(
        "an entry is believed without a look at its bytes",
        f"{STORE}/disk/folder.py",
        "verify=self._trusted.get(digest) != version)",
        "verify=False)",
        "tests/unit/store/disk/test_folder.py::test_a_changed_entry_is_not_read_but_set_aside",
    ),
    Mutant(
        "an unload takes what another server needs from the disk",
        f"{STORE}/disk/folder.py",
        "if digest in self._ledger and not self._sharers.is_needed_by_others(digest, only=False):",
        "if digest in self._ledger:",
        "tests/unit/store/disk/test_folder.py::test_what_another_sidecar_needs_stays",
    ),
    Mutant(
        "what nothing else has gives way on a full disk",
        f"{STORE}/disk/folder.py",
        "if not self._was_used_elsewhere(found) and not self._is_only_copy(found.digest):",
        "if not self._was_used_elsewhere(found):",
        "tests/unit/store/disk/test_folder.py::test_what_nothing_else_has_never_gives_way",
    ),
    Mutant(
        "a prefetch takes what was used since it came",
        f"{CORE}/slots.py",
        "            candidates = self.uses.idle(candidates, idle_since)\n",
        "            pass\n",
        "tests/unit/test_prefetch.py::test_what_was_used_since_the_call_came_stays",
    ),
    Mutant(
        "a prefetch goes before calls that wait",
        f"{CACHE}/prefetch.py",
        "            residency.slots.check(Demand(str(ref.name), None, residency.pins, 1))\n",
        "",
        "tests/unit/test_prefetch.py::test_a_call_that_waits_comes_first",
    ),
    Mutant(
        "a Forward that waits for a loader is not counted",
        f"{CACHE}/waits.py",
        "        if _is_forward.get():\n",
        "        if False:\n",
        "tests/unit/test_waits.py::test_a_forward_behind_the_jobs_of_loaders_is_counted",
    ),
    Mutant(
        "drop the mod_generation check",
        f"{CORE}/layout.py",
        "            if self.slots[slot].mod_generation > generation:\n",
        "            if False:\n",
        f"{MUSEUM}/test_wrong_weights.py::test_a_layout_that_changes_under_an_unchanged_mapping",
    ),
    Mutant(
        "a write leaves mod_generation as it was",
        f"{CORE}/layout.py",
        "        new = Slot(after, digest, generation if writes else old.mod_generation)",
        "        new = Slot(after, digest, old.mod_generation)",
        f"{MUSEUM}/test_wrong_weights.py::test_the_same_ids_come_back_in_the_same_slots",
    ),
    Mutant(
        "check before mark",
        f"{CACHE}/forwards.py",
        "        with state.marks.reading(mapping.slots):\n            mapping.check_current(state.layout)\n",
        "        mapping.check_current(state.layout)\n        [await asyncio.sleep(0) for _ in range(4)]\n"
        "        with state.marks.reading(mapping.slots):\n",
        f"{READERS}::test_a_slot_is_marked_before_its_mapping_is_checked",
    ),
    Mutant(
        "no second check",
        f"{CACHE}/forwards.py",
        "            outputs, began = await state.run(state.environment.compute_pool, self._execute, batch)\n"
        "            mapping.check_current(state.layout)\n",
        "            outputs, began = await state.run(state.environment.compute_pool, self._execute, batch)\n",
        f"{READERS}::test_a_fill_waits_for_the_kernel_that_reads_its_slot",
    ),
    Mutant(
        "the mark ends with the launch",
        f"{CACHE}/forwards.py",
        "            outputs, began = await state.run(state.environment.compute_pool, self._execute, batch)\n"
        "            mapping.check_current(state.layout)\n",
        "        outputs, began = await state.run(state.environment.compute_pool, self._execute, batch)\n"
        "        mapping.check_current(state.layout)\n",
        f"{READERS}::test_a_fill_waits_for_the_kernel_that_reads_its_slot",
    ),
    Mutant(
        "write without waiting for readers",
        f"{CACHE}/loads.py",
        "            state.marks.when_unread(slot, unread.set)\n",
        "            unread.set()\n",
        f"{READERS}::test_a_fill_waits_for_the_kernel_that_reads_its_slot",
    ),
    Mutant(
        "publish before the write ends",
        f"{CACHE}/loads.py",
        "            await state.run(state.environment.load_pool, state.device.fill, slot, weights)\n"
        "            state.residency.finish_fill(slot)\n",
        "            state.residency.finish_fill(slot)\n"
        "            await state.run(state.environment.load_pool, state.device.fill, slot, weights)\n",
        f"{CACHE_STEPS}::test_a_load_is_visible_last",
    ),
    Mutant(
        "ignore pins in the victim choice",
        f"{CORE}/slots.py",
        "parties: set[Party] = {owner.session for owner in owners.get(SlotId(index), ())}",
        "parties: set[Party] = set()",
        f"{CACHE_STEPS}::test_a_load_that_finds_every_slot_pinned_changes_nothing",
    ),
    Mutant(
        "a ring's thread computes without a mark",
        f"{CACHE}/threads.py",
        "        self._mark.begin(prepared.session, mapping.slots)\n",
        "        self._mark.begin(prepared.session, frozenset())\n",
        "tests/unit/ring/test_life.py::test_a_fill_waits_for_a_kernel_in_a_thread",
    ),
    Mutant(
        "a ring's thread does not look again",
        f"{CACHE}/threads.py",
        "            mapping.check_current(layout)\n",
        "",
        "tests/unit/ring/test_life.py::test_a_fill_waits_for_a_kernel_in_a_thread",
    ),
    Mutant(
        "a prepared Forward outlives its mapping",
        "sidecar/slotcar_sidecar/ring/forwards.py",
        "        if found is None or not found[0].is_of_now:\n",
        "        if found is None:\n",
        "tests/unit/ring/test_ring.py::test_what_is_prepared_for_a_mapping_ends_with_it",
    ),
    Mutant(
        "bytes change before readers elsewhere are told",
        f"{CORE}/slots.py",
        "        self._layout = layout\n        self._listener(layout)\n",
        "        self._layout = layout\n",
        f"{READERS}::test_readers_elsewhere_are_told_before_bytes_change",
    ),
    Mutant(
        "recover by name",
        f"{CLIENT}/protocol.py",
        'resolved[target] = f"{name}@{digest}"',
        "resolved[target] = name",
        "tests/unit/client/test_protocol.py::test_a_mapping_has_digests_by_what_the_caller_wrote",
    ),
    Mutant(
        "pins as counters",
        f"{CORE}/pins.py",
        "owners | alone if slot in wanted else owners - alone for slot",
        "owners | {object()} if slot in wanted else frozenset([*owners][1:]) for slot",
        "tests/unit/core/test_pins.py::test_a_double_release_or_a_release_by_a_stranger_changes_nothing",
    ),
    Mutant(
        "drain not revived",
        f"{CORE}/residency.py",
        "            self.slots.revive(slot)\n",
        "            pass\n",
        f"{UNLOADS}::test_loading_the_digest_again_revives_a_draining_slot",
    ),
    Mutant(
        "hold counted from the call",
        f"{CACHE}/loads.py",
        "        warnings = await self._losses(weights)\n        residency.check_binding",
        "        called = state.now()\n        warnings = await self._losses(weights)\n        residency.check_binding",
        f"{HOLDS}::test_the_time_of_a_hold_counts_from_when_the_bytes_are_there",
        also=("AdapterRef(name, adapter.digest), state.now())", "AdapterRef(name, adapter.digest), called)"),
    ),
    Mutant(
        "epoch ignored by the client",
        f"{CLIENT}/protocol.py",
        '    _audit("epoch", response.layout.epoch, mapping.version.epoch)\n',
        "",
        f"{MUSEUM}/test_life_and_death.py::test_a_client_notices_the_number_of_another_life",
    ),
    Mutant(
        "epoch ignored by the server",
        f"{CORE}/mapping.py",
        "and (layout.epoch != self.epoch or not layout.is_current((entry.slot,), self.generation))",
        "and not layout.is_current((entry.slot,), self.generation)",
        f"{MUSEUM}/test_life_and_death.py::test_a_restarted_server_reuses_a_number",
    ),
    Mutant(
        "two mappings of one generation",
        f"{CACHE}/mappings.py",
        "            residency.slots.advance()\n",
        "            pass\n",
        f"{READERS}::test_a_late_forward_never_gets_the_rows_of_a_newer_mapping_of_its_id",
    ),
    Mutant(
        "reservations only on paper",
        f"{CORE}/slots.py",
        "        self.reserved[session] = count\n",
        "        pass\n",
        f"{RESERVATIONS}::test_what_is_reserved_is_never_taken",
    ),
    Mutant(
        "a claim outlives the slot",
        f"{CORE}/slots.py",
        "            self._slot_claims.pop(digest, None)\n",
        "            pass\n",
        f"{WAITING}::test_what_came_back_after_force_is_in_the_room_of_who_brought_it",
    ),
    Mutant(
        "joins without asking for room",
        f"{CACHE}/loads.py",
        "            state.residency.slots.check(Demand(str(name), claim.party, state.residency.pins, fills))\n",
        "            if fills:\n"
        "                state.residency.slots.check(Demand(str(name), claim.party, state.residency.pins, fills))\n",
        f"{RESERVATIONS}::test_a_replace_that_joins_a_load_protects_no_more_than_the_others_slots",
    ),
    Mutant(
        "only the first is woken",
        f"{CACHE}/mappings.py",
        "            if index == 0 or asked.call.session in reserved or self._state.closing.is_set():\n",
        "            if index == 0 or self._state.closing.is_set():\n",
        f"{WAITING}::test_a_call_inside_its_reservation_is_woken_though_it_is_not_first",
    ),
    Mutant(
        "a hold takes effect after its release",
        f"{CACHE}/holds.py",
        "        self._state.withdraw_holds(owner)\n",
        "",
        f"{HOLDS}::test_a_hold_that_is_released_before_it_takes_effect_is_none",
    ),
    Mutant(
        "newcomers overtake",
        f"{CORE}/slots.py",
        "        if is_within or not self.queue or self.queue[0] is demand.turn:\n",
        "        if True:\n",
        f"{WAITING}::test_calls_that_wait_are_served_in_their_order_and_before_newcomers",
    ),
    Mutant(
        "a call that waits keeps its pins",
        f"{CACHE}/mappings.py",
        "                residency.release(call.owner)\n                state.publish()\n",
        "                pass\n",
        f"{WAITING}::test_two_engines_that_want_each_others_slots_both_make_progress_and_so_does_a_third",
    ),
    Mutant(
        "held bytes are dropped",
        f"{CORE}/residency.py",
        "return self.holds.digests() | alone | self.slots.claimed_bytes()",
        "return frozenset()",
        f"{HOLDS}::test_the_host_tier_drops_others_and_refuses_rather_than_what_is_held",
    ),
    Mutant(
        "an idle mapping is forgotten",
        f"{CACHE}/mappings.py",
        "            self._state.residency.renew(owner, mapping.entries)\n",
        "            pass\n",
        f"{MAPPINGS}::test_an_idle_mapping_loses_its_pins_and_takes_them_again",
    ),
)
