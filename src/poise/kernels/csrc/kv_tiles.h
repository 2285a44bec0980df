// K and V of a block of 64 tokens, as attention's products read them: one type for each way in which they are kept or widened.
// A page's layout is in kernels.h, what the scales multiply in docs/NUMERICS.md.
#pragma once
#include "bytes.h"
#include "kernels.h"

namespace poise {
namespace POISE_NS {

constexpr int TILE = 16;  // tokens of a tile; a block has four

// Room for tiles that are not read where they lie.
struct Scratch {
    uint16_t *zero_tile, *masked_tile;  // [16 · head_dim]; V of the last tile, masked at the end of the sequence
    uint16_t* wide_tiles;               // [4][K, V][16 · head_dim]
};

inline Scratch carve_tiles(uint16_t* memory, int head_dim) {
    const size_t tile = (size_t)TILE * head_dim;
    memset(memory, 0, sizeof(uint16_t) * tile);
    return {memory, memory + tile, memory + 2 * tile};
}

// Where the tiles of the block lie that comes next; they are asked for, row by row, while this one's are used. Blocks lie apart, and no
// hardware prefetcher finds the next one.
struct NextTiles {
    const uint8_t *next_keys[4], *next_values[4];
    // Those of the block at position `start` of an item.
    void place_next(const KVLayout& kv, const int32_t* table, int layer, int head, int start, int kv_length) {
        const int tiles_per_page = kv.block_size / TILE;
        const size_t bytes = (size_t)TILE * kv.head_dim * (kv.type == KV_INT8 ? 1 : 2);
        for (int t = 0; t < 4; t++) {
            const int token = start + t * TILE < kv_length ? start + t * TILE : start, tile = token / TILE;
            const int entry = table[tile / tiles_per_page], block = entry < 0 ? 0 : entry;  // none behind a window
            next_keys[t] = kv.keys(block, layer, head) + tile % tiles_per_page * bytes;
            next_values[t] = kv.values(block, layer, head) + tile % tiles_per_page * bytes;
        }
    }
    void ask_for_keys(int t, size_t byte) const { prefetch_far(next_keys[t] + byte); }
    void ask_for_values(int t, size_t byte) const { prefetch_far(next_values[t] + byte); }
};
struct NoNextTiles {
    void place_next(const KVLayout&, const int32_t*, int, int, int, int) {}
    void ask_for_keys(int, size_t) const {}
    void ask_for_values(int, size_t) const {}
};

// Of tile t, pair k of 16 columns: of K along head_dim, of V along tokens.
struct Bf16Values {
    static constexpr int VALUE_BYTES = 2;
    const uint16_t *keys[4], *values[4];
    template <class Pair> Pairs key_pairs(int t, int k) const { return load_pairs(keys[t] + (size_t)k * 32); }
    template <class Pair> Pairs value_pairs(int t, int k, int head_dim, int column) const {
        return load_pairs(values[t] + ((size_t)k * head_dim + column) * 2);
    }
};

// `hide` makes a tile all zeros, `place` finds it in a page; `score` and `weight` apply the tokens' scales, where they have any.
template <class Next> struct Bf16Tiles : Bf16Values, Next {
    F32 score(int, F32 s) const { return s; }
    F32 weight(int, F32 e) const { return e; }

    void hide(int t, const Scratch& scratch) { keys[t] = values[t] = scratch.zero_tile; }
    // Tile `inside` of a page; the first `valid` tokens are written, behind them a recycled page may hold anything.
    void place(int t, const KVLayout& kv, int block, int layer, int head, int inside, int valid, const Scratch& scratch) {
        const size_t offset = (size_t)inside * TILE * kv.head_dim;
        keys[t] = (const uint16_t*)kv.keys(block, layer, head) + offset;
        values[t] = (const uint16_t*)kv.values(block, layer, head) + offset;
        if (valid >= TILE) return;
        const size_t full = (size_t)(valid / 2) * kv.head_dim * 2;
        uint16_t* masked = scratch.masked_tile;
        memcpy(masked, values[t], full * 2);
        memset(masked + full, 0, (TILE * (size_t)kv.head_dim - full) * 2);
        if (valid % 2)
            for (int k = 0; k < kv.head_dim; k++) masked[full + k * 2] = values[t][full + k * 2];
        values[t] = masked;
    }
};

struct Int8Scales {
    const float *key_scales[4], *value_scales[4];
    F32 score(int t, F32 s) const { return s * load(key_scales[t]); }
    F32 weight(int t, F32 e) const { return e * load(value_scales[t]); }
    void hide_scales(int t, const Scratch& scratch) { key_scales[t] = value_scales[t] = (const float*)scratch.zero_tile; }
    void place_scales(int t, const KVLayout& kv, int block, int layer, int head, int inside) {
        key_scales[t] = kv.key_scales(block, layer, head) + inside * TILE;
        value_scales[t] = kv.value_scales(block, layer, head) + inside * TILE;
    }
};

// Widened by every reader: for few of them. What lies behind the last token is an integer, and so finite.
struct Int8Tiles : Int8Scales, NextTiles {
    static constexpr int VALUE_BYTES = 1;
    const int8_t *keys[4], *values[4];
    template <class Pair> auto key_pairs(int t, int k) const {
        const int8_t* row = keys[t] + (size_t)k * 32;
        return int8_pairs(row, row + 16, (const Pair*)nullptr);
    }
    template <class Pair> auto value_pairs(int t, int k, int head_dim, int column) const {
        const int8_t* row = values[t] + (size_t)k * 2 * head_dim + column;
        return int8_pairs(row, row + head_dim, (const Pair*)nullptr);
    }
    void hide(int t, const Scratch& scratch) {
        keys[t] = values[t] = (const int8_t*)scratch.zero_tile;
        hide_scales(t, scratch);
    }
    void place(int t, const KVLayout& kv, int block, int layer, int head, int inside, int, const Scratch&) {
        const size_t offset = (size_t)inside * TILE * kv.head_dim;
        keys[t] = (const int8_t*)kv.keys(block, layer, head) + offset;
        values[t] = (const int8_t*)kv.values(block, layer, head) + offset;
        place_scales(t, kv, block, layer, head, inside);
    }
};

// Widened once, into scratch, for many readers.
struct WidenedTiles : Bf16Values, Int8Scales, NoNextTiles {
    void hide(int t, const Scratch& scratch) {
        keys[t] = values[t] = scratch.zero_tile;
        hide_scales(t, scratch);
    }
    void place(int t, const KVLayout& kv, int block, int layer, int head, int inside, int, const Scratch& scratch) {
        const int d = kv.head_dim;
        const size_t offset = (size_t)inside * TILE * d;
        const int8_t* k = (const int8_t*)kv.keys(block, layer, head) + offset;
        const int8_t* v = (const int8_t*)kv.values(block, layer, head) + offset;
        uint16_t* wide_keys = scratch.wide_tiles + (size_t)t * 2 * TILE * d;
        uint16_t* wide_values = wide_keys + TILE * d;
        for (int pair = 0; pair < d / 2; pair++, k += 32) store_pairs(wide_keys + pair * 32, int8_pairs(k, k + 16));
        for (int pair = 0; pair < TILE / 2; pair++, v += 2 * d)
            for (int column = 0; column < d; column += 16)
                store_pairs(wide_values + ((size_t)pair * d + column) * 2, int8_pairs(v + column, v + d + column));
        keys[t] = wide_keys;
        values[t] = wide_values;
        place_scales(t, kv, block, layer, head, inside);
    }
};

}  // namespace POISE_NS
}  // namespace poise
