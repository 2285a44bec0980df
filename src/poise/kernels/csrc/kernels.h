// What a variant offers: one table of functions per instruction set. Plain C++, shared by all variants.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "containers.h"
#include "sampling.h"

namespace poise {

enum KVType { KV_BF16, KV_INT8 };

// Geometry of the pages (see attention.cpp): page → layer → K of all heads, then V of all heads; int8: then their scales.
// bf16: K of a head in tiles of 16 tokens [head_dim/2][16][2], V [block_size/2][head_dim][2].
// int8: K of a head in tiles of 16 tokens [head_dim][16], V [block_size][head_dim], scales of K and of V f32 [block_size].
struct KVLayout {
    uint8_t* base;
    size_t page_bytes;
    int num_layers, num_kv_heads, head_dim, block_size;
    KVType type;
    size_t head_bytes() const { return (size_t)block_size * head_dim * (type == KV_INT8 ? 1 : 2); }
    size_t scale_bytes() const { return type == KV_INT8 ? sizeof(float) * block_size : 0; }
    size_t layer_bytes() const { return 2 * num_kv_heads * (head_bytes() + scale_bytes()); }
    uint8_t* keys(int block, int layer, int head) const { return base + (size_t)block * page_bytes + layer * layer_bytes() + head * head_bytes(); }
    uint8_t* values(int block, int layer, int head) const { return keys(block, layer, num_kv_heads + head); }
    float* key_scales(int block, int layer, int head) const { return (float*)keys(block, layer, 2 * num_kv_heads) + (size_t)head * block_size; }
    float* value_scales(int block, int layer, int head) const { return key_scales(block, layer, num_kv_heads + head); }
};

struct RopeParams {
    int num_heads, num_kv_heads, head_dim, num_pairs;  // 2 · num_pairs rotary dimensions
    const float* angles;                               // [row][num_pairs] (cos, sin)
    const float* q_norm;                               // [head_dim] or null
    const float* k_norm;
    float eps;
    float q_scale;
};

// Attention of `num_rows` rows for one KV head: consecutive ones of one sequence, from absolute `position`; or, where `shared`,
// rows of several sequences that all see the item's splits whole, on the same blocks.
struct AttentionItem {
    const int32_t* block_table;  // of the sequence, all groups
    int kv_length;      // tokens of the sequence whose KV is written
    int row, num_rows;  // rows of the step; where `shared`, places in `shared_rows`
    int position;       // absolute position of the first row
    int kv_head;
    int first_split, num_splits;
    bool shared;
    int fold;           // NO_FOLD: write the result; else leave the states (m, l, acc) of each split behind, for this fold
    size_t partial;     // where the states of the first row's splits go
    size_t row_floats;  // from there to the next row's
};
constexpr int NO_FOLD = -1;

struct AttentionRow {
    int row, fold;
    size_t partial;
};

// Rows whose splits several items leave behind: states [row][split][unit of the head's group] from `partial` on. `num_parts`: items
// that leave some, one of shared rows counting for each of the rows.
struct AttentionFold {
    int row, num_rows, position, kv_head, first_split, num_splits;
    size_t partial, row_floats;
    int num_parts;
};

struct AttentionParams {
    const KVLayout* kv;
    int layer, num_heads;
    int first_column;   // of the group's table among a sequence's block tables
    int window;         // a row at position p sees p - window + 1 … p; 0: all up to p
    const uint16_t* q;  // [row][num_heads][head_dim] bf16
    float* out;         // [row][num_heads · head_dim]
    const AttentionRow* shared_rows;
    float* partials;
};

// Where the instruction that multiplies pairs of bf16 is used; WHERE_FASTER is a wish, never an answer.
enum class DotBF16 { NOWHERE, IN_PRODUCTS, EVERYWHERE, WHERE_FASTER };

enum ProductKind { INT8_PRODUCTS, BF16_PRODUCTS, F32_PRODUCTS };

struct KernelTable {
    const char* name;
    int max_tile;  // rows of a full tile
    // Product of one panel with one tile of prepared rows: out[height][16].
    void (*gemm)(const Matrix& matrix, int panel, const uint8_t* tile, int height, float* out);
    // Prepares row `index` of a tile of `height` rows; `x` null: a row of padding.
    void (*prepare_row)(Form form, const float* x, int cols, uint8_t* tile, int height, int index);
    void (*rms_norm)(const float* x, const float* weight, float eps, int n, float* out);
    void (*dequantize_row)(const Matrix& matrix, int row, float* out);
    void (*silu_mul)(const float* gate, const float* up, float* out);  // 16 elements
    void (*gelu_mul)(const float* gate, const float* up, float* out);  // 16 elements
    void (*rope_angles)(int32_t position, const float* inverse_frequencies, int num_pairs, float* out);
    // One head of one row: norm, rope, rounding. kind 0 q (bf16), 1 k, 2 v (to the slot of a block; int8 where `scale` is given).
    void (*rope_head)(const RopeParams& rope, int kind, const float* x, int row, void* out, float* scale, int slot_in_block);
    // `next` is the item that the worker likely computes afterwards: what that reads may be asked for.
    void (*attend)(const AttentionParams& params, const AttentionItem& item, const AttentionItem& next, float* scratch);
    void (*fold_partials)(const AttentionParams& params, const AttentionFold& fold);
    SampleRowFn sample_row;
    DotBF16 (*choose_dot_bf16)(DotBF16 most);
    // The machine's own limits, for rooflines (probe.cpp).
    uint32_t (*probe_read)(const uint8_t* p, size_t bytes, size_t ahead);
    uint32_t (*probe_products)(ProductKind kind, int64_t rounds, const uint8_t* operands, int64_t* operations);
    int attention_rows;  // units (row × head of the group) that an attention item may hold
};

size_t attention_scratch_floats(int head_dim);

enum class Isa { BASELINE, AVX2, AVX512 };
const KernelTable* kernel_table(Isa isa);  // null where not built or the CPU lacks it
DotBF16 choose_dot_bf16(Isa isa, DotBF16 most);  // NOWHERE where the CPU lacks the instruction

namespace baseline { const KernelTable& table(); }
namespace avx2 { const KernelTable& table(); }
namespace avx512 { const KernelTable& table(); }

constexpr int MAX_TILE = 16;
constexpr int MAX_UNITS = 48;

// The first position that a row at `position` sees. (static: each variant keeps its own)
static inline int first_visible(int position, int window) { return window && position >= window ? position - window + 1 : 0; }

// Height of the tile that starts where `rows` rows are left: a full tile, or the smallest of 1, 2, 4, 8, 16 that holds them.
inline int tile_height(int rows, int max_tile) {
    if (rows >= max_tile) return max_tile;
    int h = 1;
    while (h < rows) h *= 2;
    return h;
}

}  // namespace poise
