// How a step's attention is cut into items for one KV group. A tile is some consecutive rows of a sequence. Its splits of 256
// positions go to one item or to several, and are folded afterwards where several made them. Splits that lie on the same blocks
// in several sequences go to shared items, for rows of all of these: K and V are loaded once. Who computes a split changes no
// bit (docs/NUMERICS.md, Attention).
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels.h"
#include "step.h"

namespace poise {

constexpr int SPLIT = 256;

class AttentionPlan {
  public:
    int window = 0;  // of the group's layers; 0: none

    // Cuts a step whose arrays are valid. `first_column`: where the group's table begins among a sequence's tables.
    void build(const StepArrays& step, const KVLayout& kv, int first_column, int num_heads, int workers, bool share_prefixes);

    const std::vector<AttentionItem>& items() const { return items_; }  // to be taken from the end: the longest are there
    const std::vector<AttentionFold>& folds() const { return folds_; }
    const std::vector<AttentionRow>& shared_rows() const { return shared_rows_; }
    size_t partial_floats() const { return partial_floats_; }
    // Keys that sequences of the last step did not read for themselves: the pass of another over the same blocks served them.
    int64_t spared_keys() const { return spared_keys_; }

  private:
    struct Tile {
        int sequence, row, num_rows, position, first_split, num_splits;
        int num_shared;      // splits that shared items compute
        size_t shared;       // in is_shared_: one flag for each split
        size_t partial = 0;  // floats [row][KV head][split][unit][state], where it is folded
        int fold = 0;        // of the first KV head, where it is folded
    };
    struct Candidate {  // a tile that may share its splits first_split … end_split - 1
        int tile, first_split, end_split;
        const int32_t* blocks;
    };
    struct SharedSplit {
        int split, begin, end, num_rows;  // tiles sharing_[begin … end - 1]
    };

    void lay_tiles(const StepArrays& step);
    void find_shared_splits(const StepArrays& step, int block_size, int first_column);
    void add_own_items(const StepArrays& step, int num_kv_heads, int workers);
    void add_shared_items(const StepArrays& step, int num_kv_heads, int workers);
    size_t row_floats(const Tile& tile, int num_kv_heads) const { return (size_t)num_kv_heads * tile.num_splits * split_floats_; }

    int rows_per_tile_ = 1;
    size_t split_floats_ = 0;  // states of one row, one KV head and one split
    std::vector<Tile> tiles_;
    std::vector<uint8_t> is_shared_;
    std::vector<Candidate> candidates_;
    std::vector<int> sharing_;
    std::vector<SharedSplit> shared_splits_;

    std::vector<AttentionItem> items_;
    std::vector<AttentionFold> folds_;
    std::vector<AttentionRow> shared_rows_;
    size_t partial_floats_ = 0;
    int64_t spared_keys_ = 0;
};

}  // namespace poise
