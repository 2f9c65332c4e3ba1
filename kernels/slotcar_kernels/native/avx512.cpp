/* The kernel for AVX-512: the algorithm of avx2.cpp on vectors of twice the width. */
#include "internal.h"

#if defined(__AVX512F__) && defined(__AVX512BW__)

#include "avx512_vector.h"

slotcar::Compute slotcar::avx512_compute() { return compute<Avx512>; }
slotcar::Fill slotcar::avx512_fill() { return fill_array<Avx512>; }
slotcar::Seed slotcar::avx512_seed() { return seed_segment<Avx512>; }

#else

slotcar::Compute slotcar::avx512_compute() { return nullptr; }
slotcar::Fill slotcar::avx512_fill() { return nullptr; }
slotcar::Seed slotcar::avx512_seed() { return nullptr; }

#endif
