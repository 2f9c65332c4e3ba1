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
    const SlotcarBatch batch{rows, order.data(), segments, 2, nullptr, 0, x.stored.data(), in, in, dtype, nullptr};
    const SlotcarSite site{a.stored.data(), b.stored.data(), rank * in, in,           rank * out, out, slot_dtype,
                           ranks,           scales,          out,       found.data(), out,        base.stored.data(), out, 1, 0, 0};
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

/* Two slots of two experts each, a row for each of the four; and the same matrices as embeddings, a token for each row. */
bool finds_experts_and_tokens() {
    constexpr int64_t in = 5, out = 7, rank = 3, rows = 4;
    const Matrix<float> x(rows * in, 1), a(rows * rank * in, 1), b(rows * rank * out, 1);
    std::vector<float> found(rows * out), looked_up(rows * out);
    const SlotcarSegment segments[] = {{0, 0, 1}, {1, 1, 2}, {2, 2, 3}, {3, 3, 4}}, whole[] = {{1, 0, 4}};
    const int64_t ranks[] = {rank, rank, rank, rank}, ids[] = {2, 0, 1, 4};
    const float scales[] = {1, 1, 1, 1};
    SlotcarBatch batch{rows, nullptr, segments, 4, nullptr, 0, x.stored.data(), in, in, SLOTCAR_FLOAT32, nullptr};
    SlotcarSite site{a.stored.data(), b.stored.data(), 2 * rank * in, in,   2 * rank * out, out, SLOTCAR_FLOAT32, ranks, scales, out,
                     found.data(),    out,             nullptr,       0,    2,              rank * in, rank * out};
    bool right = slotcar_lora_forward(&batch, &site, 1, SLOTCAR_PORTABLE, 1) == SLOTCAR_OK;
    batch.segments = whole;
    batch.segment_count = 1;
    batch.ids = ids;
    site = {a.stored.data(), b.stored.data(),  rank * in, rank,    rank * out, out, SLOTCAR_FLOAT32, ranks, scales, out,
            looked_up.data(), out,             nullptr,   0,       1,          0,   0};
    right &= slotcar_lora_forward(&batch, &site, 1, SLOTCAR_PORTABLE, 1) == SLOTCAR_OK;
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t o = 0; o < out; ++o) {
            double expert = 0, token = 0;
            for (int64_t r = 0; r < rank; ++r) {
                double h = 0;
                for (int64_t k = 0; k < in; ++k) h += x.values[row * in + k] * a.values[(row * rank + r) * in + k];
                expert += h * b.values[(row * rank + r) * out + o];
                token += a.values[rank * in + ids[row] * rank + r] * b.values[(rank + r) * out + o];
            }
            right &= fabs(found[row * out + o] - expert) < 1e-4 && fabs(looked_up[row * out + o] - token) < 1e-4;
        }
    const int64_t wrong[] = {2, 0, in, 4};
    batch.ids = wrong;
    right &= slotcar_lora_forward(&batch, &site, 1, SLOTCAR_PORTABLE, 1) == SLOTCAR_BAD_ID;
    printf("experts and tokens: %s\n", right ? "right" : "wrong");
    return right;
}

/* Slot 0 has a gain, slot 1 a bias; the last row is of BASE. */
template <class T>
bool seeds(int64_t dtype, double allowed) {
    constexpr int64_t out = 37, rows = 3;
    const Matrix<float> vectors(4 * out, 1);
    const Matrix<T> base(rows * out, 1);
    std::vector<T> found(rows * out);
    const SlotcarSegment segments[] = {{0, 0, 1}, {1, 1, 2}};
    const SlotcarRange ranges[] = {{2, 3}};
    const int64_t flags[] = {SLOTCAR_GAIN, SLOTCAR_BIAS};
    const SlotcarBatch batch{rows, nullptr, segments, 2, ranges, 1, nullptr, 0, 0, dtype, nullptr};
    const SlotcarSeed seed{vectors.stored.data(), 2 * out,      out, flags, out, found.data(), out, base.stored.data(),
                           base.stored.data(),    out,          out};
    bool right = slotcar_seed(&batch, &seed, SLOTCAR_PORTABLE) == SLOTCAR_OK;
    for (int64_t i = 0; i < rows * out; ++i) {
        double wanted = base.values[i];
        if (i < out) wanted += vectors.values[i] * base.values[i];
        if (i >= out && i < 2 * out) wanted += vectors.values[2 * out + i];
        right &= fabs(to_float(found[i]) - wanted) <= (i < 2 * out ? allowed * (1 + fabs(wanted)) : 0);
    }
    printf("seed: %s\n", right ? "right" : "wrong");
    return right;
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
    all &= finds_experts_and_tokens();
    all &= seeds<float>(SLOTCAR_FLOAT32, 1e-6);
    all &= seeds<Float16>(SLOTCAR_FLOAT16, 1.0 / 2048);
    all &= seeds<Bfloat16>(SLOTCAR_BFLOAT16, 1.0 / 256);
    return all ? 0 : 1;
}
