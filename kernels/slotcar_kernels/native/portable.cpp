/* The kernel in standard C++ with the vectors of GCC and Clang: any processor, NEON or SSE2 by the compiler. */
#include "fill.h"
#include "internal.h"
#include "kernel.h"
#include "seed.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace slotcar {
namespace {

struct Portable {
    typedef float Reg __attribute__((vector_size(16)));
    static constexpr int64_t width = 4;
    static constexpr int accumulators = 8;

    static Reg zero() { return Reg{}; }
    static Reg broadcast(float value) { return Reg{value, value, value, value}; }

    template <class T>
    static Reg load(const T *from) {
        Reg values;
        for (int lane = 0; lane < width; ++lane) values[lane] = to_float(from[lane]);
        return values;
    }

    static void load_split(const Bfloat16 *from, Reg (&to)[2]) {
        to[0] = load(from);
        to[1] = load(from + width);
    }
    static void split(Reg (&)[2]) {}
    static void join(Reg (&)[2]) {}

    template <class T>
    static void store(T *to, Reg values) {
        for (int lane = 0; lane < width; ++lane) from_float(values[lane], to[lane]);
    }

    static void stream_line(void *to, const void *from) { memcpy(to, from, 64); }

    static Reg add(Reg a, Reg b) { return a + b; }

    static Reg fma(Reg a, Reg b, Reg sum) {
#if defined(__aarch64__)
        return vfmaq_f32(sum, a, b);
#else
        return sum + a * b;
#endif
    }

    static float sum(Reg values) { return (values[0] + values[2]) + (values[1] + values[3]); }
};

}  // namespace

Compute portable_compute() { return compute<Portable>; }
Fill portable_fill() { return fill_array<Portable>; }
Seed portable_seed() { return seed_segment<Portable>; }

}  // namespace slotcar
