/* The kernel against float64 on a processor that has no Python here: test_build.py runs it in an emulator. */
#include <math.h>
#include <stdio.h>

#include <vector>

#include "lora.h"
#include "numbers.h"

namespace {

using namespace slotcar;

double random_value() {
    static uint32_t state = 1;
    state = state * 1664525 + 1013904223;
    return static_cast<double>(state) / 2147483648.0 - 1.0;
}

/* What the number `value` becomes in T, and what that stands for. */
template <class T>
double put(double value, T &to) {
    from_float(static_cast<float>(value), to);
    return to_float(to);
}

template <class T>
struct Matrix {
    std::vector<T> stored;
    std::vector<double> values;

    Matrix(int64_t count, double scale) : stored(count), values(count) {
        for (int64_t i = 0; i < count; ++i) values[i] = put(random_value() * scale, stored[i]);
    }
};

/* Rows 0, 2, 4, … use slot 1, the others slot 0. Returns the largest error, relative to 1 + |truth|. */
template <class T, class S>
double largest_error(int64_t dtype, int64_t slot_dtype, int64_t rows, int64_t in, int64_t out, int64_t rank) {
    const Matrix<T> x(rows * in, 1), base(rows * out, 1);
    const Matrix<S> a(2 * rank * in, 1 / sqrt(in)), b(2 * rank * out, 1 / sqrt(rank));
    std::vector<T> found(rows * out);
    std::vector<int64_t> order;
    for (int64_t slot = 1; slot >= 0; --slot)
        for (int64_t row = 1 - slot; row < rows; row += 2) order.push_back(row);
    const int64_t middle = (rows + 1) / 2, ranks[] = {rank, rank};
    const SlotcarSegment segments[] = {{1, 0, middle}, {0, middle, rows}};
    const float scales[] = {0.5f, 2.0f};
    const SlotcarBatch batch{rows, order.data(), segments, 2, nullptr, 0, x.stored.data(), in, in, dtype};
    const SlotcarSite site{a.stored.data(), b.stored.data(), rank * in, in,           rank * out, out, slot_dtype,
                           ranks,           scales,          out,       found.data(), out,        base.stored.data(), out};
    if (slotcar_lora_forward(&batch, &site, 1, SLOTCAR_PORTABLE, 2) != SLOTCAR_OK) return INFINITY;
    double worst = 0;
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t slot = 1 - row % 2;
        std::vector<double> h(rank, 0);
        for (int64_t r = 0; r < rank; ++r)
            for (int64_t k = 0; k < in; ++k) h[r] += x.values[row * in + k] * a.values[(slot * rank + r) * in + k];
        for (int64_t o = 0; o < out; ++o) {
            double truth = base.values[row * out + o];
            for (int64_t r = 0; r < rank; ++r)
                truth += scales[1 - slot] * h[r] * b.values[(slot * rank + r) * out + o];
            const double error = fabs(to_float(found[row * out + o]) - truth) / (1 + fabs(truth));
            if (!(error <= worst)) worst = error;
        }
    }
    return worst;
}

template <class T, class S>
bool good(const char *name, int64_t dtype, int64_t slot_dtype, double allowed) {
    double worst = 0;
    for (int64_t rows : {1, 2, 3, 4, 7, 150})
        for (int64_t rank : {1, 7, 16, 33}) {
            const double error = largest_error<T, S>(dtype, slot_dtype, rows, 1031, 69, rank);
            if (!(error <= worst)) worst = error;
        }
    printf("%s: off by %g of %g\n", name, worst, allowed);
    return worst <= allowed;
}

/* Whether a slot's array has each value of the adapter's, rounded, and zeros behind them. */
template <class From, class To>
bool fills(int64_t from_dtype, int64_t to_dtype, int64_t rows, int64_t columns, bool transposed) {
    const Matrix<From> from(rows * columns, 1);
    std::vector<To> to((rows + 2) * columns, To{});
    const SlotcarFill fill{from.stored.data(), from_dtype, transposed, to.data(), rows, columns, 2};
    if (slotcar_fill(&fill, 1, to_dtype, SLOTCAR_PORTABLE) != SLOTCAR_OK) return false;
    for (int64_t r = 0; r < rows + 2; ++r)
        for (int64_t c = 0; c < columns; ++c) {
            To wanted{};
            if (r < rows) put(from.values[transposed ? c * rows + r : r * columns + c], wanted);
            if (to_float(to[r * columns + c]) != to_float(wanted)) return false;
        }
    return true;
}

bool fills_every_array() {
    bool all = true;
    for (bool transposed : {false, true})
        for (int64_t rows : {1, 8, 17})
            for (int64_t columns : {1, 64, 131}) {
                all &= fills<float, float>(SLOTCAR_FLOAT32, SLOTCAR_FLOAT32, rows, columns, transposed);
                all &= fills<float, Bfloat16>(SLOTCAR_FLOAT32, SLOTCAR_BFLOAT16, rows, columns, transposed);
                all &= fills<float, Float16>(SLOTCAR_FLOAT32, SLOTCAR_FLOAT16, rows, columns, transposed);
                all &= fills<Bfloat16, Bfloat16>(SLOTCAR_BFLOAT16, SLOTCAR_BFLOAT16, rows, columns, transposed);
                all &= fills<Float16, float>(SLOTCAR_FLOAT16, SLOTCAR_FLOAT32, rows, columns, transposed);
            }
    printf("fill: %s\n", all ? "right" : "wrong");
    return all;
}

}  // namespace

int main() {
    bool all = slotcar_abi_version() == SLOTCAR_ABI_VERSION;
    all &= good<float, float>("float32", SLOTCAR_FLOAT32, SLOTCAR_FLOAT32, 1e-5);
    all &= good<Float16, Float16>("float16", SLOTCAR_FLOAT16, SLOTCAR_FLOAT16, 1.0 / 2048 + 1e-5);
    all &= good<Bfloat16, Bfloat16>("bfloat16", SLOTCAR_BFLOAT16, SLOTCAR_BFLOAT16, 1.0 / 256 + 1e-5);
    all &= good<Bfloat16, float>("bfloat16, float32 slots", SLOTCAR_BFLOAT16, SLOTCAR_FLOAT32, 1.0 / 256 + 1e-5);
    all &= fills_every_array();
    return all ? 0 : 1;
}
