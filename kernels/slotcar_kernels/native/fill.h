/* One array of a slot from an adapter's: as it is or transposed, copied or cast, with zeros behind it.
 *
 *     from [columns, rows]          band, in L1            to [rows, columns]
 *     ┌─rows─┐                   ┌─64 columns─┐           ┌────────columns────────┐
 *     │ tile │ 64 columns   ᵀ →  │ 8 rows     │  cast →   │  8 rows │             │
 *     │------│                   └────────────┘           │─────────┘             │
 *
 * A tile of `from` is read once, as one run of memory. Whole cache lines of `to` are written past the caches, where V
 * can: else a load of hundreds of MiB would take them from the Forwards beside it, and each line would be read first.
 */
#ifndef SLOTCAR_FILL_H
#define SLOTCAR_FILL_H

#include "internal.h"
#include "tiles.h"
#include "transpose.h"

namespace slotcar {
namespace {

constexpr int64_t kFillColumns = 64;  // of a tile: at least two cache lines of each row of `to`
constexpr int64_t kFillRows = 8;      // of a band
constexpr int64_t kCastRun = 1024;    // elements that are cast before they are written

/* Bytes as they are. */
template <class V>
inline void write_bytes(const void *from, void *to, int64_t bytes) {
    const char *source = static_cast<const char *>(from);
    char *target = static_cast<char *>(to);
    int64_t i = 0;
    if (reinterpret_cast<uintptr_t>(to) % kLineBytes == 0)
        for (; i + kLineBytes <= bytes; i += kLineBytes) V::stream_line(target + i, source + i);
    memcpy(target + i, source + i, static_cast<size_t>(bytes - i));
}

/* to[i] = from[i] */
template <class V, class T>
inline void write_run(const T *from, T *to, int64_t count) {
    write_bytes<V>(from, to, count * static_cast<int64_t>(sizeof(T)));
}

/* to[i] = from[i], rounded */
template <class V, class From, class To>
inline void write_run(const From *from, To *to, int64_t count) {
    alignas(kLineBytes) To cast[kCastRun];
    for (int64_t start = 0; start < count; start += kCastRun) {
        const int64_t length = least(kCastRun, count - start);
        int64_t i = 0;
        for (; i + V::width <= length; i += V::width) V::store(cast + i, V::load(from + start + i));
        if (i < length) store_part<V>(cast + i, load_part<V>(from + start + i, length - i), length - i);
        write_run<V>(cast, to + start, length);
    }
}

/* to[r, c] = from[c, r], rounded */
template <class V, class From, class To>
void write_transposed(const From *from, To *to, int64_t rows, int64_t columns) {
    alignas(kLineBytes) From band[kFillRows * kFillColumns];
    for (int64_t c = 0; c < columns; c += kFillColumns) {
        const int64_t width = least(kFillColumns, columns - c);
        for (int64_t r = 0; r < rows; r += kFillRows) {
            const int64_t height = least(kFillRows, rows - r);
            transpose(from + c * rows + r, rows, height, width, band, kFillColumns);
            for (int64_t i = 0; i < height; ++i)
                write_run<V>(band + i * kFillColumns, to + (r + i) * columns + c, width);
        }
    }
}

template <class V, class From, class To>
void fill_typed(const SlotcarFill &fill) {
    const From *from = static_cast<const From *>(fill.from);
    To *to = static_cast<To *>(fill.to);
    const int64_t values = fill.rows * fill.columns, zeros = fill.zero_rows * fill.columns;
    if (values && fill.transposed)
        write_transposed<V>(from, to, fill.rows, fill.columns);
    else if (values)
        write_run<V>(from, to, values);
    if (zeros) memset(to + values, 0, static_cast<size_t>(zeros) * sizeof(To));
}

template <class V, class To>
void fill_to(const SlotcarFill &fill) {
    switch (fill.from_dtype) {
        case SLOTCAR_FLOAT32: return fill_typed<V, float, To>(fill);
        case SLOTCAR_FLOAT16: return fill_typed<V, Float16, To>(fill);
        default: return fill_typed<V, Bfloat16, To>(fill);
    }
}

template <class V>
void fill_array(const SlotcarFill &fill, int64_t to_dtype) {
    switch (to_dtype) {
        case SLOTCAR_FLOAT32: return fill_to<V, float>(fill);
        case SLOTCAR_FLOAT16: return fill_to<V, Float16>(fill);
        default: return fill_to<V, Bfloat16>(fill);
    }
}

}  // namespace
}  // namespace slotcar

#endif
