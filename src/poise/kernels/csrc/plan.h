// A model recorded as a flat list of operations, replayed by all workers once per step. Row count, positions and block tables
// come from the step, so one plan serves every batch. An operation is one or more phases; a phase is cut into chunks, of which
// workers take their own share first, and ends when all are done: a worker that lost its core holds up no more than one chunk.
// Where a step has rows enough, all operations from one attention to the next are a single phase, whose chunks are strips of rows.
#pragma once
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "attention_plan.h"
#include "kernels.h"
#include "memory.h"
#include "pool.h"
#include "step.h"

namespace poise {

struct PackedMatrix {
    std::shared_ptr<Arena> arena;  // owns the bytes
    Matrix matrix;
};

class Plan {
  public:
    Plan(std::shared_ptr<Pool> pool, const KernelTable* kernels, int max_rows, int logit_tile, KVLayout kv, int num_blocks);

    // Recording. Buffers are float32 [max_rows][width], named by index.
    int buffer(int width);
    float* buffer_data(int index) { return buffers_[index].data; }
    int buffer_width(int index) const { return buffers_[index].width; }
    // `layer` is the layer's place in a page, `table` the KV group whose block table names the page. A `post_norm` norms a product
    // (in buffer `product`) before it joins the residual.
    void embed(const Matrix& table, float scale, int out);
    void norm_linear(int in, const float* norm, float eps, std::vector<Matrix> weights, std::vector<const float*> biases, int out);
    void rope_kv_write(int qkv, const float* inverse_frequencies, int num_pairs, int layer, int num_heads, const float* q_norm, const float* k_norm,
                       float eps, float q_scale, int out, int table);
    void attention(int q, int layer, int num_heads, int out, int table, int window);
    void linear_residual(int in, const Matrix& weight, int x, const float* post_norm, float eps, int product);
    void gated_mlp(int x, const float* norm, float eps, const Matrix& gate, const Matrix& up, const Matrix& down, bool gelu,
                   const float* post_norm, int product);
    void logits(int x, const float* norm, float eps, const Matrix& output);

    // Replays the plan. Throws std::invalid_argument for a token, position or block out of range.
    void run(const StepArrays& step);

    int vocabulary() const { return vocabulary_; }

    // Whether splits that lie on the same blocks in several sequences are computed once for all of them; the bits are the same.
    void set_share_prefixes(bool on) { share_prefixes_ = on; }
    bool share_prefixes() const { return share_prefixes_; }
    // For each table: keys of the last run's sequences that the pass of another one served.
    std::vector<int64_t> spared_keys() const;

    // Profiling. After a run: monotonic ns before the first operation (angles come before it) and behind each one, as worker 0
    // saw them, and the ns that each worker waited for others. Operations are named in recording order; those that strips of rows
    // went through together share their time as they did in worker 0's strips.
    void set_profiling(bool on) { profiling_ = on; }
    bool profiling() const { return profiling_; }
    const std::vector<int64_t>& times() const { return times_; }
    // The first operation behind the last KV write, where only rows whose logits are asked for go on; how many operations there are, where
    // there is none such.
    size_t first_of_wanted() const;
    std::vector<int64_t> waits() const;
    std::vector<std::string> operation_names() const;

  private:
    enum class Kind { EMBED, NORM_LINEAR, ROPE_KV_WRITE, ATTENTION, LINEAR_RESIDUAL, GATED_MLP, LOGITS };
    struct Operation {
        Kind kind;
        int in = -1, out = -1, product = -1, layer = 0, num_heads = 0, rope = -1, table = 0;
        const float *norm = nullptr, *q_norm = nullptr, *k_norm = nullptr, *post_norm = nullptr;
        float eps = 0, q_scale = 0, scale = 1;
        bool gelu = false, of_wanted = false;  // see first_of_wanted
        std::vector<Matrix> weights;
        std::vector<Matrix> down;  // of a gated MLP
        std::vector<const float*> biases;
    };
    struct Buffer {
        float* data;
        int width;
    };
    struct Rope {
        const float* inverse_frequencies;
        int num_pairs;
        float* angles;  // [max_rows][2 · num_pairs]
    };
    struct Prepared {  // rows of activations, in tiles
        size_t row_bytes = 0;  // of the widest
        uint8_t* data = nullptr;
    };
    struct Tiles {  // prepared rows in each form, from the first of some rows on
        uint8_t* data[NUM_FORMS];
    };
    struct Worker {
        float* rows = nullptr;       // a tile of normed rows
        Prepared inputs[NUM_FORMS];  // of an operation, where they are a single tile
        float* attention = nullptr;  // scratch of an attention item
        void* sampling = nullptr;
        alignas(64) int64_t waited = 0;  // ns of the last run, where it is profiled
    };
    enum class Store { WRITE, ADD };
    enum class Order { FORWARD, BACKWARD };
    struct alignas(64) Counter {
        std::atomic<uint32_t> value{0};
    };
    struct Range {
        int begin, end;
        int count() const { return end - begin; }
    };
    struct Walk {  // where a worker stands in the plan
        int worker, phase;
        bool alone;  // with rows of its own: its phases are nobody else's
    };

    void check(const StepArrays& step) const;
    void check_blocks(const StepArrays& step, int sequence, int table) const;
    void plan_attention(const StepArrays& step);
    void work(int worker);
    template <class F> void phase(Walk& walk, int count, int chunk, F f, Order order = Order::FORWARD);
    int chunk_of(int count, int smallest) const;
    int num_strips(int num_rows) const;
    template <class F> void by_strips(Range rows, Walk& walk, F f);
    size_t run_from(size_t first, Walk& walk);
    void stamp(const std::vector<int64_t>& spent);
    void run_rows(const Operation& op, Range rows, Walk& walk);
    void choose_wanted(const StepArrays& step);
    bool of_wanted(const Operation& op) const { return gathers_ && op.of_wanted; }
    const Buffer& residual(const Operation& op, int buffer) const { return of_wanted(op) ? wanted_ : buffers_[buffer]; }
    Tiles tiles_of(const Prepared* in, int first_row) const;
    Tiles prepare(const Buffer& in, const float* norm, float eps, const std::vector<Matrix>& weights, Range rows, const int32_t* named, Walk& walk);
    void prepare_tile(Form form, const float* const* x, int cols, uint8_t* tile, int height);
    void multiply(const Tiles& in, const std::vector<Matrix>& weights, const std::vector<const float*>& biases, Range rows, Store mode, float* out, int out_width, Walk& walk);
    void multiply_panels(const uint8_t* in, const Matrix& weight, Range panels, const float* bias, Range rows, Store mode, float* out, int out_width);
    void gate_up(const Tiles& in, const Operation& op, Range pairs, Range rows);
    void add_to_residual(const Tiles& in, const Operation& op, const std::vector<Matrix>& weights, Range rows, Walk& walk);
    int table_columns(const StepArrays& step) const { return step.table_stride / (int)attention_.size(); }
    void rope_kv(const Operation& op, Range heads);
    void attend(const Operation& op, Walk& walk);
    void count_part(const AttentionPlan& plan, const AttentionParams& params, int fold);
    void logits(const Operation& op, Walk& walk);
    void logits_of_rows(const Operation& op, int first, Range rows, Walk& walk);
    void reserve(Prepared* in, const Matrix& weight);

    std::shared_ptr<Pool> pool_;
    const KernelTable* kernels_;
    const int max_rows_, logit_tile_, num_blocks_;
    KVLayout kv_;
    Arena arena_;
    std::vector<Operation> operations_;
    std::vector<Buffer> buffers_;
    std::vector<Rope> ropes_;
    std::vector<Worker> workers_;
    Prepared inputs_[NUM_FORMS], hidden_[NUM_FORMS];  // of an operation, and between the two halves of a gated MLP
    int widest_ = 0, vocabulary_ = 0, num_heads_ = 0;
    float* logits_ = nullptr;
    bool ready_ = false, profiling_ = false;
    std::vector<int64_t> times_;

    StepArrays step_{};
    bool gathers_ = false;               // the step's wanted rows go on alone, side by side in wanted_
    Buffer wanted_{nullptr, 0};
    std::vector<uint8_t> is_wanted_;     // of each row
    std::vector<AttentionPlan> attention_;  // of each table
    bool share_prefixes_ = true;
    std::vector<float> partials_;           // one layer's are folded before the next layer writes its own
    std::unique_ptr<std::atomic<int>[]> arrived_;  // parts of each fold of a layer, 0 between layers; whoever brings the last one folds
    size_t num_arrived_ = 0;
    std::unique_ptr<Counter[]> counters_;  // of each phase: chunks done, then chunks taken of each worker's own
    size_t num_phases_ = 0, num_phases_used_ = 0;
};

}  // namespace poise
