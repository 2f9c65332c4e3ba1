"""vLLM with slotcar, beside vLLM with its own LoRA: tokens a second, and memory.

32 sequences decode greedily in one batch on the CPU, in float32, over adapters of rank 16 on all linear layers, each
row with one of 2 or 8. A step is one token for each row: vLLM's scheduler, the model and the sampling. The sides are
vLLM without adapters, vLLM with its own LoRA, and vLLM with slotcar on the direct plane and on the ring. Each is an
engine in a process of its own; all of a table are there at once and take turns, so that drift favours nobody, and an
engine that has no turn does nothing. Prompts are computed before the clock starts, the first turn of each warms up.

What LoRA costs is a side's step less the base model's in the same round; of these, and of all else, the median. CPU
times are those of engine and sidecar. The settings are the best that we found for vLLM's own LoRA: as many slots as
there are adapters, no larger rank than theirs, all of them in memory, and no layers but those that they are on. Its
CPU platform compiles no model that has adapters, so no side is compiled. One thread is what vLLM takes for itself on
two cores, where it leaves one to its scheduler; with two, both cores are its own, and it has Intel's OpenMP as it
advises.

Memory is what a group of engines keeps in anonymous and shared pages, with 8 adapters of which each was used. The
sidecar is counted with all that it has, its Python included; of engines, what they have over as many without adapters,
all of them after their allocators gave back what they only keep for later.
"""
