// Weight containers: how a packed matrix lies in memory. Plain C++, shared by all variants.
//
// A matrix [rows = N outputs][cols = K inputs] is cut into panels of 16 outputs. Integer panels go group by group (32 weights of
// each of the 16 outputs); within a group, "quad" j holds k = 4j … 4j+3 of all 16 outputs in one 64-byte line [16 outputs][4 k],
// which is the operand of one dot instruction.
//   nibbles   4 lines: low nibble of line r = quad r, high nibble = quad r + 4
//   i5 plane  1 line: bit j of a byte = bit 4 of quad j's byte
//   i6 plane  2 lines: line t, bits 2i…2i+1 of a byte = bits 4…5 of quad 4t + i
//   i8        8 lines: quad j as u8
// Scales stay as compact as in the file and lie behind the weights of their group (16 outputs side by side):
//   Q4_0 Q5_0 Q8_0  f16 scale          Q4_1 Q5_1  f16 scale, f16 minimum
//   Q4_K Q5_K       per 256: f16 d, f16 dmin in front; per group: u8 scale, u8 minimum
//   Q6_K            per 256: f16 d in front; per group: i8 scale of k 0…15, i8 scale of k 16…31
// Float panels: bf16 [K/2][16][2] (K padded with a zero), f16 [K][16], f32 [K][16].
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace poise {

enum Format : int { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, BF16, F16, F32_, NUM_FORMATS };

// How activations are prepared: by default as FORMATS says; BF16_GROUPS_FORM takes bf16 activations to integer weights.
enum Form : int { INT8_FORM, BF16_FORM, F32_FORM, BF16_GROUPS_FORM, NUM_FORMS };

struct FormatInfo {
    const char* name;
    int block;         // weights per file block
    int block_bytes;   // bytes per file block
    int group_bytes;   // packed bytes per panel and group of 32
    int super_bytes;   // packed bytes per panel and 256, in front of 8 groups (0: no super-blocks)
    Form form;
};

constexpr FormatInfo FORMATS[NUM_FORMATS] = {
    {"Q4_0", 32, 18, 256 + 32, 0, INT8_FORM},
    {"Q4_1", 32, 20, 256 + 64, 0, INT8_FORM},
    {"Q5_0", 32, 22, 320 + 32, 0, INT8_FORM},
    {"Q5_1", 32, 24, 320 + 64, 0, INT8_FORM},
    {"Q8_0", 32, 34, 512 + 32, 0, INT8_FORM},
    {"Q4_K", 256, 144, 256 + 32, 64, INT8_FORM},
    {"Q5_K", 256, 176, 320 + 32, 64, INT8_FORM},
    {"Q6_K", 256, 210, 384 + 32, 32, INT8_FORM},
    {"BF16", 1, 2, 0, 0, BF16_FORM},
    {"F16", 1, 2, 0, 0, F32_FORM},
    {"F32", 1, 4, 0, 0, F32_FORM},
};

struct Matrix {
    Format format;
    Form form;
    int rows, cols;      // N outputs, K inputs
    int panels;          // of 16 outputs; the last may be partly padding
    size_t panel_bytes;
    const uint8_t* data; // 64-byte aligned
    const uint8_t* panel(int p) const { return data + (size_t)p * panel_bytes; }
};

constexpr size_t panel_bytes(Format format, int cols) {
    const FormatInfo& info = FORMATS[format];
    switch (format) {
        case BF16: return (size_t)((cols + 1) / 2) * 64;
        case F16: return (size_t)cols * 32;
        case F32_: return (size_t)cols * 64;
        default: return (size_t)(cols / 32) * info.group_bytes + (size_t)(cols / 256) * info.super_bytes;
    }
}

// Prepared activations lie tile by tile; a tile of height h (rows, some of them padding) is, per group of 32 for int8:
//   h × 32 int8 q | h f32 d | h f32 d·S | h int32 −8·S | h int32 −8·S(k 0…15) | h int32 −8·S(k 16…31)
// for bf16, per pair: h × 2 bf16; for f32, per element: h f32; for bf16 in groups, per group of 32:
//   16 pairs of h × 2 bf16 | h f32 sum of the group
constexpr int INT8_GROUP_BYTES = 32 + 20;
constexpr int BF16_GROUP_BYTES = 64 + 4;

constexpr size_t prepared_row_bytes(Form form, int cols) {
    switch (form) {
        case INT8_FORM: return (size_t)(cols / 32) * INT8_GROUP_BYTES;
        case BF16_FORM: return (size_t)((cols + 1) / 2) * 4;
        case BF16_GROUPS_FORM: return (size_t)(cols / 32) * BF16_GROUP_BYTES;
        default: return (size_t)cols * 4;
    }
}

// Writes one packed panel from up to 16 stored rows (null: a row of padding).
void pack_panel(Format format, int cols, const uint8_t* const rows[16], uint8_t* out);

}  // namespace poise
