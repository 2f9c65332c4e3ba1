/* The 16-bit number types and their conversions, rounding to nearest even, without special instructions. */
#ifndef SLOTCAR_NUMBERS_H
#define SLOTCAR_NUMBERS_H

#include <stdint.h>
#include <string.h>

namespace slotcar {
namespace {

struct Float16 {
    uint16_t bits;
};

struct Bfloat16 {
    uint16_t bits;
};

inline float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

[[maybe_unused]] inline float to_float(float value) { return value; }

[[maybe_unused]] inline float to_float(Bfloat16 value) { return float_of_bits(static_cast<uint32_t>(value.bits) << 16); }

[[maybe_unused]] inline void from_float(float value, float &to) { to = value; }

[[maybe_unused]] inline void from_float(float value, Bfloat16 &to) {
    const uint32_t bits = bits_of(value);
    const bool nan = (bits & 0x7fffffff) > 0x7f800000;
    to.bits = static_cast<uint16_t>(nan ? (bits >> 16) | 0x40 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#if defined(__aarch64__)

[[maybe_unused]] inline float to_float(Float16 value) {
    __fp16 half;
    memcpy(&half, &value, sizeof half);
    return static_cast<float>(half);
}

[[maybe_unused]] inline void from_float(float value, Float16 &to) {
    const __fp16 half = static_cast<__fp16>(value);
    memcpy(&to, &half, sizeof half);
}

#else

/* After the FP16 library of M. Dukhan: the exponent is moved by a multiplication, which is right for subnormals too. */
[[maybe_unused]] inline float to_float(Float16 value) {
    const uint32_t word = static_cast<uint32_t>(value.bits) << 16;
    const uint32_t sign = word & 0x80000000, twice = word + word;
    const float normal = float_of_bits((twice >> 4) + (0xe0u << 23)) * 0x1.0p-112f;
    const float subnormal = float_of_bits((twice >> 17) | (126u << 23)) - 0.5f;
    return float_of_bits(sign | bits_of(twice < (1u << 27) ? subnormal : normal));
}

/* The addition to a power of two rounds the mantissa where a half's ends. */
[[maybe_unused]] inline void from_float(float value, Float16 &to) {
    const uint32_t word = bits_of(value), twice = word + word, sign = word & 0x80000000;
    const float magnitude = float_of_bits(word & 0x7fffffff) * 0x1.0p+112f * 0x1.0p-110f;
    const uint32_t exponent = twice & 0xff000000, least = 0x71000000;
    const float rounded = float_of_bits(((exponent < least ? least : exponent) >> 1) + 0x07800000) + magnitude;
    const uint32_t half = ((bits_of(rounded) >> 13) & 0x7c00) + (bits_of(rounded) & 0x0fff);
    to.bits = static_cast<uint16_t>((sign >> 16) | (twice > 0xff000000 ? 0x7e00 : half));
}

#endif

}  // namespace
}  // namespace slotcar

#endif
