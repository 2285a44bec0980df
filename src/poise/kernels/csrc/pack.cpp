// From the file's blocks to panels (see containers.h). Exact: only bits move.
#include "containers.h"

#include <cstring>

namespace poise {
namespace {

struct Group {  // one group of 32 weights of one row
    uint8_t u[32];
};

inline void low_nibbles(const uint8_t* q, uint8_t* u) {
    for (int j = 0; j < 16; j++) {
        u[j] = q[j] & 15;
        u[j + 16] = q[j] >> 4;
    }
}

inline void fifth_bits(const uint8_t* high, uint8_t* u) {
    uint32_t h;
    std::memcpy(&h, high, 4);
    for (int j = 0; j < 32; j++) u[j] |= ((h >> j) & 1) << 4;
}

// The 6-bit scale and minimum of group g in the 12 packed bytes of Q4_K and Q5_K.
inline void k_scale(const uint8_t* s, int g, uint8_t& scale, uint8_t& minimum) {
    if (g < 4) {
        scale = s[g] & 63;
        minimum = s[g + 4] & 63;
    } else {
        scale = (s[g + 4] & 15) | ((s[g - 4] >> 6) << 4);
        minimum = (s[g + 4] >> 4) | ((s[g] >> 6) << 4);
    }
}

// Unsigned weights of group g of a stored row.
inline void unpack_group(Format format, const uint8_t* row, int g, uint8_t* u) {
    const uint8_t* b = row + (size_t)(g * 32 / FORMATS[format].block) * FORMATS[format].block_bytes;
    const int i = g % 8;  // group within a super-block
    switch (format) {
        case Q4_0: low_nibbles(b + 2, u); break;
        case Q4_1: low_nibbles(b + 4, u); break;
        case Q5_0: low_nibbles(b + 6, u); fifth_bits(b + 2, u); break;
        case Q5_1: low_nibbles(b + 8, u); fifth_bits(b + 4, u); break;
        case Q8_0:
            for (int j = 0; j < 32; j++) u[j] = b[2 + j] ^ 0x80;
            break;
        case Q4_K:
        case Q5_K: {
            const uint8_t* q = b + (format == Q4_K ? 16 : 48) + (i / 2) * 32;
            const int shift = (i % 2) * 4;
            for (int j = 0; j < 32; j++) u[j] = (q[j] >> shift) & 15;
            if (format == Q5_K)
                for (int j = 0; j < 32; j++) u[j] |= ((b[16 + j] >> i) & 1) << 4;
            break;
        }
        case Q6_K: {
            const uint8_t* low = b + (i / 4) * 64 + (i % 2) * 32;
            const uint8_t* high = b + 128 + (i / 4) * 32;
            const int nibble = (i % 4) / 2 * 4, pair = (i % 4) * 2;
            for (int j = 0; j < 32; j++) u[j] = ((low[j] >> nibble) & 15) | (((high[j] >> pair) & 3) << 4);
            break;
        }
        default: break;
    }
}

void pack_group(Format format, int g, const uint8_t* const rows[16], uint8_t* out) {
    alignas(64) uint8_t u[16][32];
    for (int n = 0; n < 16; n++) {
        if (rows[n]) unpack_group(format, rows[n], g, u[n]);
        else std::memset(u[n], 0, 32);
    }
    const auto quad = [&](int j, int byte) -> uint8_t { return u[byte / 4][j * 4 + byte % 4]; };
    uint8_t* p = out;
    if (format == Q8_0) {
        for (int j = 0; j < 8; j++)
            for (int n = 0; n < 16; n++) std::memcpy(p + j * 64 + n * 4, &u[n][j * 4], 4);
        p += 512;
    } else {
        for (int r = 0; r < 4; r++)
            for (int byte = 0; byte < 64; byte++) p[r * 64 + byte] = (quad(r, byte) & 15) | (quad(r + 4, byte) << 4);
        p += 256;
        if (format == Q5_0 || format == Q5_1 || format == Q5_K) {
            std::memset(p, 0, 64);
            for (int j = 0; j < 8; j++)
                for (int byte = 0; byte < 64; byte++) p[byte] |= (quad(j, byte) >> 4) << j;
            p += 64;
        } else if (format == Q6_K) {
            std::memset(p, 0, 128);
            for (int j = 0; j < 8; j++)
                for (int byte = 0; byte < 64; byte++) p[(j / 4) * 64 + byte] |= (quad(j, byte) >> 4) << (2 * (j % 4));
            p += 128;
        }
    }
    for (int n = 0; n < 16; n++) {
        const uint8_t* row = rows[n];
        const uint8_t* b = row ? row + (size_t)(g * 32 / FORMATS[format].block) * FORMATS[format].block_bytes : nullptr;
        switch (format) {
            case Q4_0:
            case Q5_0:
            case Q8_0:
                if (b) std::memcpy(p + n * 2, b, 2);
                else std::memset(p + n * 2, 0, 2);
                break;
            case Q4_1:
            case Q5_1:
                if (b) {
                    std::memcpy(p + n * 2, b, 2);
                    std::memcpy(p + 32 + n * 2, b + 2, 2);
                } else {
                    std::memset(p + n * 2, 0, 2);
                    std::memset(p + 32 + n * 2, 0, 2);
                }
                break;
            case Q4_K:
            case Q5_K:
                p[n] = p[16 + n] = 0;
                if (b) k_scale(b + 4, g % 8, p[n], p[16 + n]);
                break;
            case Q6_K:
                p[n] = b ? b[192 + (g % 8) * 2] : 0;
                p[16 + n] = b ? b[192 + (g % 8) * 2 + 1] : 0;
                break;
            default: break;
        }
    }
}

void pack_super(Format format, int block, const uint8_t* const rows[16], uint8_t* out) {
    for (int n = 0; n < 16; n++) {
        const uint8_t* b = rows[n] ? rows[n] + (size_t)block * FORMATS[format].block_bytes : nullptr;
        const int at = format == Q6_K ? 208 : 0;
        if (b) std::memcpy(out + n * 2, b + at, 2);
        else std::memset(out + n * 2, 0, 2);
        if (format == Q6_K) continue;
        if (b) std::memcpy(out + 32 + n * 2, b + 2, 2);
        else std::memset(out + 32 + n * 2, 0, 2);
    }
}

}  // namespace

void pack_panel(Format format, int cols, const uint8_t* const rows[16], uint8_t* out) {
    const FormatInfo& info = FORMATS[format];
    if (info.form == INT8_FORM) {
        for (int g = 0; g < cols / 32; g++) {
            if (info.super_bytes && g % 8 == 0) {
                pack_super(format, g / 8, rows, out);
                out += info.super_bytes;
            }
            pack_group(format, g, rows, out);
            out += info.group_bytes;
        }
        return;
    }
    const int size = info.block_bytes;  // bytes of one element
    const int step = format == BF16 ? 2 : 1;
    for (int k = 0; k < cols; k += step) {
        for (int n = 0; n < 16; n++) {
            for (int i = 0; i < step; i++) {
                if (rows[n] && k + i < cols) std::memcpy(out, rows[n] + (size_t)(k + i) * size, size);
                else std::memset(out, 0, size);
                out += size;
            }
        }
    }
}

}  // namespace poise
