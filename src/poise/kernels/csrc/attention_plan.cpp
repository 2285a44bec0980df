#include "attention_plan.h"

#include <algorithm>
#include <cstring>

namespace poise {
namespace {

constexpr int ITEMS_PER_WORKER = 4, SHARED_ITEMS_PER_WORKER = 2;  // fewer are cut further: workers must even out

int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace

void AttentionPlan::build(const StepArrays& step, const KVLayout& kv, int first_column, int num_heads, int workers, bool share_prefixes) {
    const int group = num_heads / kv.num_kv_heads;
    rows_per_tile_ = std::max(1, MAX_UNITS / group);
    split_floats_ = (size_t)group * (kv.head_dim + 2);
    items_.clear();
    folds_.clear();
    shared_rows_.clear();
    shared_splits_.clear();
    sharing_.clear();
    partial_floats_ = 0;
    spared_keys_ = 0;
    lay_tiles(step);
    if (share_prefixes && step.num_sequences > 1) find_shared_splits(step, kv.block_size, first_column);
    add_own_items(step, kv.num_kv_heads, workers);
    add_shared_items(step, kv.num_kv_heads, workers);
}

void AttentionPlan::lay_tiles(const StepArrays& step) {
    tiles_.clear();
    size_t num_splits = 0;
    for (int s = 0; s < step.num_sequences; s++) {
        const int begin = step.query_start[s], end = step.query_start[s + 1];
        for (int row = begin; row < end; row += rows_per_tile_) {
            const int rows = std::min(rows_per_tile_, end - row), position = step.positions[row];
            const int first = first_visible(position, window) / SPLIT, splits = (position + rows - 1) / SPLIT + 1 - first;
            tiles_.push_back({s, row, rows, position, first, splits, 0, num_splits});
            num_splits += splits;
        }
    }
    is_shared_.assign(num_splits, 0);
}

// Finds the sets of sequences that share all blocks of a split which all their rows see whole. A tile that is full of rows shares
// its loads already, so only sequences of few rows count.
void AttentionPlan::find_shared_splits(const StepArrays& step, int block_size, int first_column) {
    candidates_.clear();
    int first_split = INT32_MAX, end_split = 0;
    for (int t = 0; t < (int)tiles_.size(); t++) {
        const Tile& tile = tiles_[t];
        const int s = tile.sequence, last = tile.position + tile.num_rows - 1;
        if (step.query_start[s + 1] - step.query_start[s] > rows_per_tile_ / 2) continue;
        const int first = ceil_div(first_visible(last, window), SPLIT), end = (tile.position + 1) / SPLIT;
        if (first >= end) continue;
        candidates_.push_back({t, first, end, step.block_tables + (size_t)s * step.table_stride + first_column});
        first_split = std::min(first_split, first);
        end_split = std::max(end_split, end);
    }
    for (int split = first_split; split < end_split && candidates_.size() > 1; split++) {
        const int column = split * SPLIT / block_size, columns = ((split + 1) * SPLIT - 1) / block_size + 1 - column;
        const auto order = [&](const Candidate& a, const Candidate& b) { return std::memcmp(a.blocks + column, b.blocks + column, sizeof(int32_t) * columns); };
        const auto end = std::partition(candidates_.begin(), candidates_.end(), [&](const Candidate& c) { return c.first_split <= split && split < c.end_split; });
        std::sort(candidates_.begin(), end, [&](const Candidate& a, const Candidate& b) {
            const int o = order(a, b);
            return o ? o < 0 : a.tile < b.tile;
        });
        auto kept = candidates_.begin();
        for (auto begin = candidates_.begin(), next = begin; begin != end; begin = next) {
            while (next != end && order(*begin, *next) == 0) next++;
            if (next - begin < 2) continue;
            SharedSplit shared{split, (int)sharing_.size(), 0, 0};
            for (auto c = begin; c != next; c++) {
                Tile& tile = tiles_[c->tile];
                tile.num_shared++;
                is_shared_[tile.shared + split - tile.first_split] = 1;
                sharing_.push_back(c->tile);
                shared.num_rows += tile.num_rows;
            }
            shared.end = (int)sharing_.size();
            shared_splits_.push_back(shared);
            spared_keys_ += (int64_t)(next - begin - 1) * SPLIT;
            kept = std::move(begin, next, kept);
        }
        if (!window) candidates_.erase(kept, candidates_.end());  // who shares nothing here shares nothing behind it
    }
}

// Tiles × KV heads; where these are too few for the workers, their splits are several items.
void AttentionPlan::add_own_items(const StepArrays& step, int num_kv_heads, int workers) {
    const int all = (int)tiles_.size() * num_kv_heads;
    const int pieces = workers > 1 && all < ITEMS_PER_WORKER * workers ? ceil_div(ITEMS_PER_WORKER * workers, all) : 1;
    for (Tile& tile : tiles_) {
        const int own = tile.num_splits - tile.num_shared, per_item = std::max(1, ceil_div(own, pieces));
        const bool folded = tile.num_shared || own > per_item;
        const size_t row = row_floats(tile, num_kv_heads);
        if (folded) {
            tile.partial = partial_floats_;
            partial_floats_ += row * tile.num_rows;
        }
        const int32_t* table = step.block_tables + (size_t)tile.sequence * step.table_stride;
        const int length = step.positions[step.query_start[tile.sequence + 1] - 1] + 1;
        const uint8_t* shared = is_shared_.data() + tile.shared;
        tile.fold = (int)folds_.size();
        for (int head = 0; head < num_kv_heads; head++) {
            const size_t partial = tile.partial + (size_t)head * tile.num_splits * split_floats_;
            const int fold = folded ? tile.fold + head : NO_FOLD;
            int num_parts = 0;
            for (int split = 0, end; split < tile.num_splits; split = end) {
                end = split + 1;
                if (shared[split]) continue;
                while (end < tile.num_splits && end - split < per_item && !shared[end]) end++;
                items_.push_back({table, length, tile.row, tile.num_rows, tile.position, head, tile.first_split + split, end - split, false, fold, partial + split * split_floats_, row});
                num_parts++;
            }
            if (folded) folds_.push_back({tile.row, tile.num_rows, tile.position, head, tile.first_split, tile.num_splits, partial, row, num_parts});
        }
    }
}

// A shared split × KV heads, as many rows at a time as an item takes. Nothing in it is masked, so that an item needs no positions:
// its rows stand, in name, at the split's last key and behind it.
void AttentionPlan::add_shared_items(const StepArrays& step, int num_kv_heads, int workers) {
    int all = 0;
    for (const SharedSplit& shared : shared_splits_) all += ceil_div(shared.num_rows, rows_per_tile_) * num_kv_heads;
    const int pieces = all && workers > 1 && all < SHARED_ITEMS_PER_WORKER * workers ? ceil_div(SHARED_ITEMS_PER_WORKER * workers, all) : 1;
    for (const SharedSplit& shared : shared_splits_) {
        const int32_t* table = step.block_tables + (size_t)tiles_[sharing_[shared.begin]].sequence * step.table_stride;
        const int end = (shared.split + 1) * SPLIT, most = std::max(1, shared.num_rows / 2);
        const int cuts = std::max(ceil_div(shared.num_rows, rows_per_tile_), std::min(most, ceil_div(shared.num_rows, rows_per_tile_) * pieces));
        for (int head = 0; head < num_kv_heads; head++) {
            const int first = (int)shared_rows_.size();
            for (int i = shared.begin; i < shared.end; i++) {
                const Tile& tile = tiles_[sharing_[i]];
                const size_t at = tile.partial + ((size_t)head * tile.num_splits + shared.split - tile.first_split) * split_floats_;
                const int fold = tile.fold + head;
                for (int r = 0; r < tile.num_rows; r++) shared_rows_.push_back({tile.row + r, fold, at + r * row_floats(tile, num_kv_heads)});
                folds_[fold].num_parts += tile.num_rows;
            }
            for (int cut = 0; cut < cuts; cut++) {
                const int begin = shared.num_rows * cut / cuts, rows = shared.num_rows * (cut + 1) / cuts - begin;
                items_.push_back({table, end, first + begin, rows, end - 1, head, shared.split, 1, true, NO_FOLD, 0, 0});
            }
        }
    }
}

}  // namespace poise
