#include "plan.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>

namespace poise {
namespace {

constexpr size_t CHUNK_BYTES = 256 << 10;  // prepared rows that a pass over the panels keeps in cache

constexpr int STRIP_ROWS = 64;             // what a worker takes through several operations alone stays in its cache
constexpr int PHASES_PER_OPERATION = 5;
constexpr int CHUNKS_PER_WORKER = 6;

int64_t now_ns() { return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

size_t attention_scratch_floats(int head_dim) {
    const size_t state = 2 * MAX_UNITS + (size_t)MAX_UNITS * head_dim;
    const size_t tiles = (2 + 4 * 2) * 16 * (size_t)head_dim;  // see kv_tiles.h, Scratch
    return 2 * state + 2 * 6 * 64 + (size_t)MAX_UNITS * head_dim + tiles / 2 + 16;
}

Plan::Plan(std::shared_ptr<Pool> pool, const KernelTable* kernels, int max_rows, int logit_tile, KVLayout kv, int num_blocks)
    : pool_(std::move(pool)), kernels_(kernels), max_rows_(max_rows), logit_tile_(logit_tile), num_blocks_(num_blocks), kv_(kv) {}

int Plan::buffer(int width) {
    auto* data = (float*)arena_.allocate(sizeof(float) * (size_t)(max_rows_ + MAX_TILE) * width);
    buffers_.push_back({data, width});
    widest_ = std::max(widest_, width);
    return (int)buffers_.size() - 1;
}

void Plan::reserve(Prepared* in, const Matrix& weight) {
    size_t& row_bytes = in[weight.form].row_bytes;
    row_bytes = std::max(row_bytes, prepared_row_bytes(weight.form, weight.cols));
    widest_ = std::max(widest_, weight.cols);
    ready_ = false;
}

void Plan::embed(const Matrix& table, float scale, int out) {
    Operation op{Kind::EMBED};
    op.scale = scale;
    op.out = out;
    op.weights = {table};
    operations_.push_back(op);
}

void Plan::norm_linear(int in, const float* norm, float eps, std::vector<Matrix> weights, std::vector<const float*> biases, int out) {
    Operation op{Kind::NORM_LINEAR};
    op.in = in;
    op.out = out;
    op.norm = norm;
    op.eps = eps;
    for (const auto& w : weights) reserve(inputs_, w);
    op.weights = std::move(weights);
    op.biases = std::move(biases);
    operations_.push_back(op);
}

void Plan::rope_kv_write(int qkv, const float* inverse_frequencies, int num_pairs, int layer, int num_heads, const float* q_norm, const float* k_norm,
                         float eps, float q_scale, int out, int table) {
    Operation op{Kind::ROPE_KV_WRITE};
    op.table = table;
    attention_.resize(std::max(attention_.size(), (size_t)table + 1));
    op.in = qkv;
    op.out = out;
    op.layer = layer;
    op.num_heads = num_heads;
    op.q_norm = q_norm;
    op.k_norm = k_norm;
    op.eps = eps;
    op.q_scale = q_scale;
    for (size_t i = 0; i < ropes_.size(); i++)
        if (ropes_[i].inverse_frequencies == inverse_frequencies) op.rope = (int)i;
    if (op.rope < 0) {
        op.rope = (int)ropes_.size();
        ropes_.push_back({inverse_frequencies, num_pairs, (float*)arena_.allocate(sizeof(float) * (size_t)max_rows_ * 2 * num_pairs)});
    }
    operations_.push_back(op);
}

void Plan::attention(int q, int layer, int num_heads, int out, int table, int window) {
    if (num_heads_ && num_heads_ != num_heads) throw std::invalid_argument("all layers of a plan share one number of heads");
    num_heads_ = num_heads;
    Operation op{Kind::ATTENTION};
    op.table = table;
    attention_.resize(std::max(attention_.size(), (size_t)table + 1));
    for (const auto& other : operations_)
        if (other.kind == Kind::ATTENTION && other.table == table && attention_[table].window != window)
            throw std::invalid_argument("all layers of a KV group share one window");
    attention_[table].window = window;
    op.in = q;
    op.out = out;
    op.layer = layer;
    op.num_heads = num_heads;
    operations_.push_back(op);
    ready_ = false;
}

void Plan::linear_residual(int in, const Matrix& weight, int x, const float* post_norm, float eps, int product) {
    Operation op{Kind::LINEAR_RESIDUAL};
    op.in = in;
    op.out = x;
    op.post_norm = post_norm;
    op.eps = eps;
    op.product = product;
    reserve(inputs_, weight);
    op.weights = {weight};
    operations_.push_back(op);
}

void Plan::gated_mlp(int x, const float* norm, float eps, const Matrix& gate, const Matrix& up, const Matrix& down, bool gelu,
                     const float* post_norm, int product) {
    Operation op{Kind::GATED_MLP};
    op.in = op.out = x;
    op.gelu = gelu;
    op.post_norm = post_norm;
    op.product = product;
    op.norm = norm;
    op.eps = eps;
    for (const auto* w : {&gate, &up}) reserve(inputs_, *w);
    reserve(hidden_, down);
    op.weights = {gate, up};
    op.down = {down};
    operations_.push_back(op);
}

void Plan::logits(int x, const float* norm, float eps, const Matrix& output) {
    Operation op{Kind::LOGITS};
    op.in = x;
    op.norm = norm;
    op.eps = eps;
    reserve(inputs_, output);
    op.weights = {output};
    vocabulary_ = output.rows;
    operations_.push_back(op);
}

namespace {
void fail(const std::string& what, int64_t value) { throw std::invalid_argument(what + " " + std::to_string(value) + " is out of range"); }
}  // namespace

// The pages that a sequence's rows write or see in one group; those behind a window may be gone.
void Plan::check_blocks(const StepArrays& step, int sequence, int table) const {
    const int begin = step.positions[step.query_start[sequence]], end = step.positions[step.query_start[sequence + 1] - 1];
    const int columns = table_columns(step);
    if (end / kv_.block_size >= columns) fail("block table length", columns);
    const int32_t* blocks = step.block_tables + (size_t)sequence * step.table_stride + table * columns;
    for (int b = first_visible(begin, attention_[table].window) / kv_.block_size; b <= end / kv_.block_size; b++)
        if (blocks[b] < 0 || blocks[b] >= num_blocks_) fail("block id", blocks[b]);
}

void Plan::check(const StepArrays& step) const {
    if (step.num_rows < 1 || step.num_rows > max_rows_) fail("row count", step.num_rows);
    if (step.num_sequences < 1 || step.query_start[0] != 0 || step.query_start[step.num_sequences] != step.num_rows)
        fail("sequence count", step.num_sequences);
    for (int s = 0; s < step.num_sequences; s++)
        if (step.query_start[s + 1] <= step.query_start[s] || step.query_start[s + 1] > step.num_rows) fail("rows of sequence", s);
    for (const auto& op : operations_)
        if (op.kind == Kind::EMBED)
            for (int r = 0; r < step.num_rows; r++)
                if (step.token_ids[r] < 0 || step.token_ids[r] >= op.weights[0].rows) fail("token id", step.token_ids[r]);
    for (int s = 0; s < step.num_sequences; s++) {
        const int begin = step.query_start[s], end = step.query_start[s + 1];
        for (int r = begin; r < end; r++)
            if (step.positions[r] < 0 || step.positions[r] != step.positions[begin] + r - begin) fail("position", step.positions[r]);
        for (int table = 0; table < (int)attention_.size(); table++) check_blocks(step, s, table);
    }
    for (int i = 0; i < step.num_logit_rows; i++)
        if (step.logit_rows[i] < 0 || step.logit_rows[i] >= step.num_rows) fail("logit row", step.logit_rows[i]);
}

void Plan::plan_attention(const StepArrays& step) {
    if (!num_heads_) return;
    size_t partial_floats = 0, num_folds = 0;
    for (int table = 0; table < (int)attention_.size(); table++) {
        attention_[table].build(step, kv_, table * table_columns(step), num_heads_, pool_->size(), share_prefixes_);
        partial_floats = std::max(partial_floats, attention_[table].partial_floats());
        num_folds = std::max(num_folds, attention_[table].folds().size());
    }
    if (partials_.size() < partial_floats) partials_.resize(partial_floats);
    if (num_arrived_ < num_folds) {
        arrived_ = std::make_unique<std::atomic<int>[]>(num_folds);
        num_arrived_ = num_folds;
    }
}

size_t Plan::first_of_wanted() const {
    constexpr Kind LAST[] = {Kind::ROPE_KV_WRITE, Kind::ATTENTION, Kind::LINEAR_RESIDUAL, Kind::GATED_MLP, Kind::LOGITS};
    const size_t count = operations_.size(), length = std::size(LAST);
    if (count < length) return count;
    for (size_t i = 0; i < length; i++)
        if (operations_[count - length + i].kind != LAST[i]) return count;
    const int x = operations_[count - 1].in;
    return operations_[count - 3].out == x && operations_[count - 2].out == x ? count - length + 1 : count;
}

// Rows whose logits nobody asks for are done when their KV is written. The others' residuals go on side by side.
void Plan::choose_wanted(const StepArrays& step) {
    bool all = step.num_logit_rows == step.num_rows;
    for (int i = 0; all && i < step.num_rows; i++) all = step.logit_rows[i] == i;
    gathers_ = wanted_.data && !all && step.num_logit_rows <= step.num_rows;
    if (!gathers_) return;
    is_wanted_.assign(step.num_rows, 0);
    for (int i = 0; i < step.num_logit_rows; i++) is_wanted_[step.logit_rows[i]] = 1;
}

std::vector<int64_t> Plan::spared_keys() const {
    std::vector<int64_t> keys;
    for (const auto& plan : attention_) keys.push_back(plan.spared_keys());
    return keys;
}

void Plan::run(const StepArrays& step) {
    check(step);
    if (!ready_) {
        for (auto* prepared : {inputs_, hidden_})
            for (int form = 0; form < NUM_FORMS; form++)
                if (prepared[form].row_bytes) prepared[form].data = arena_.allocate(prepared[form].row_bytes * (max_rows_ + MAX_TILE));
        workers_.clear();
        for (int i = 0; i < pool_->size(); i++) {
            Worker& worker = workers_.emplace_back();
            worker.rows = (float*)arena_.allocate(sizeof(float) * MAX_TILE * widest_);
            worker.attention = (float*)arena_.allocate(sizeof(float) * attention_scratch_floats(kv_.head_dim));
            if (vocabulary_) worker.sampling = arena_.allocate(sampling_scratch_bytes(vocabulary_));
            for (int form = 0; form < NUM_FORMS; form++)
                if (inputs_[form].row_bytes) worker.inputs[form] = {inputs_[form].row_bytes, arena_.allocate(inputs_[form].row_bytes * MAX_TILE)};
        }
        if (vocabulary_) logits_ = (float*)arena_.allocate(sizeof(float) * (size_t)logit_tile_ * (vocabulary_ + 16));
        for (size_t i = 0; i < operations_.size(); i++) operations_[i].of_wanted = i >= first_of_wanted();
        if (first_of_wanted() < operations_.size()) wanted_ = buffers_[buffer(buffers_[operations_.back().in].width)];
        num_phases_ = 1 + PHASES_PER_OPERATION * operations_.size() + 3 * (max_rows_ / logit_tile_ + 1);
        counters_ = std::make_unique<Counter[]>(num_phases_ * (1 + pool_->size()));
        num_phases_used_ = 0;
        ready_ = true;
    }
    step_ = step;
    for (size_t i = 0; i < num_phases_used_ * (1 + pool_->size()); i++) counters_[i].value.store(0, std::memory_order_relaxed);
    choose_wanted(step);
    plan_attention(step);
    auto task = [this](int worker) { work(worker); };
    pool_->run(task);
}

void Plan::work(int worker) {
    Walk walk{worker, 0, false};
    workers_[worker].waited = 0;
    if (!ropes_.empty())
        phase(walk, step_.num_rows, chunk_of(step_.num_rows, 4), [&](Range rows) {
            for (const auto& rope : ropes_)
                for (int r = rows.begin; r < rows.end; r++)
                    kernels_->rope_angles(step_.positions[r], rope.inverse_frequencies, rope.num_pairs, rope.angles + (size_t)r * 2 * rope.num_pairs);
        });
    if (profiling_ && worker == 0) times_.assign(1, now_ns());
    for (size_t i = 0; i < operations_.size();) i = run_from(i, walk);
    if (worker == 0) num_phases_used_ = walk.phase;
}

// Runs operation `first`, and with it those behind it that the same strips of rows go through; returns the next one.
size_t Plan::run_from(size_t first, Walk& walk) {
    const auto across_rows = [&](size_t i) { return operations_[i].kind == Kind::ATTENTION || operations_[i].kind == Kind::LOGITS; };
    const int rows = of_wanted(operations_[first]) ? step_.num_logit_rows : step_.num_rows;
    size_t end = first + 1;
    if (!across_rows(first) && num_strips(rows))
        while (end < operations_.size() && !across_rows(end)) end++;
    const bool timed = profiling_ && walk.worker == 0;
    std::vector<int64_t> spent(timed ? end - first : 0);
    if (across_rows(first)) {
        if (operations_[first].kind == Kind::ATTENTION) attend(operations_[first], walk);
        else logits(operations_[first], walk);
    } else {
        by_strips({0, rows}, walk, [&](Range mine, Walk& own) {
            for (size_t i = first; i < end; i++) {
                const int64_t begin = timed ? now_ns() : 0;
                run_rows(operations_[i], mine, own);
                if (timed) spent[i - first] += now_ns() - begin;
            }
        });
    }
    if (timed) stamp(spent);
    return end;
}

// Operations that went through strips together share the time since the last stamp as worker 0's own strips did.
void Plan::stamp(const std::vector<int64_t>& spent) {
    const int64_t begin = times_.back(), end = now_ns(), total = std::accumulate(spent.begin(), spent.end(), (int64_t)0);
    int64_t sum = 0;
    for (size_t i = 0; i + 1 < spent.size(); i++) {
        sum += spent[i];
        times_.push_back(begin + (int64_t)((double)(end - begin) * (double)sum / (double)std::max(total, (int64_t)1)));
    }
    times_.push_back(end);
}

std::vector<int64_t> Plan::waits() const {
    std::vector<int64_t> waits;
    for (const auto& worker : workers_) waits.push_back(worker.waited);
    return waits;
}

std::vector<std::string> Plan::operation_names() const {
    static constexpr const char* NAMES[] = {"embed", "norm_linear", "rope_kv_write", "attention", "linear_residual", "gated_mlp", "logits"};
    std::vector<std::string> names;
    for (const auto& op : operations_) names.push_back(NAMES[(int)op.kind]);
    return names;
}

// Chunks of [0, count): enough for the workers to even out, but not below `smallest`.
int Plan::chunk_of(int count, int smallest) const { return std::max(smallest, count / (CHUNKS_PER_WORKER * pool_->size())); }

// Each worker takes the chunks of its own share (what the neighbouring phases gave it lies near), then what is left of the others'.
template <class F> void Plan::phase(Walk& walk, int count, int chunk, F f, Order order) {
    if (walk.alone) return f(Range{0, count});
    const int workers = pool_->size();
    Counter* counters = &counters_[(size_t)walk.phase++ * (1 + workers)];
    const uint32_t chunks = (count + chunk - 1) / chunk, share = (chunks + workers - 1) / workers;
    uint32_t finished = 0;
    for (int turn = 0; turn < workers; turn++) {
        const int owner = (walk.worker + turn) % workers;
        const uint32_t begin = owner * share, end = std::min(chunks, begin + share);
        if (begin >= end) continue;
        auto& taken = counters[1 + owner].value;
        if (turn && taken.load(std::memory_order_relaxed) >= end - begin) continue;
        for (uint32_t k; (k = taken.fetch_add(1, std::memory_order_relaxed)) < end - begin; finished++) {
            const int first = (int)(order == Order::FORWARD ? begin + k : end - 1 - k) * chunk;
            f(Range{first, std::min(count, first + chunk)});
        }
    }
    auto& done = counters[0].value;
    if (finished && done.fetch_add(finished, std::memory_order_acq_rel) + finished == chunks) done.notify_all();
    const int64_t begin = profiling_ ? now_ns() : 0;
    Pool::wait_until(done, chunks);
    if (profiling_) workers_[walk.worker].waited += now_ns() - begin;
}

// Strips of whole tiles, as many for each worker; 0 where workers would get rows too unevenly.
int Plan::num_strips(int num_rows) const {
    const int full = kernels_->max_tile, workers = pool_->size(), tiles = (num_rows + full - 1) / full;
    const int tiles_of_worker = (tiles + workers - 1) / workers;
    if (num_rows * 10 < workers * tiles_of_worker * full * 9) return 0;
    return workers * ((tiles_of_worker * full + STRIP_ROWS - 1) / STRIP_ROWS);
}

// Calls f(rows, walk) for strips of rows, each of which a worker takes through everything alone: what it wrote lies in its own cache, and
// it waits for nobody. Or else for all rows, and all workers share each phase.
template <class F> void Plan::by_strips(Range rows, Walk& walk, F f) {
    const int strips = num_strips(rows.count());
    if (!strips) return f(rows, walk);
    const int full = kernels_->max_tile, tiles = (rows.count() + full - 1) / full;
    const auto begin = [&](int strip) { return std::min(rows.end, rows.begin + strip * tiles / strips * full); };
    phase(walk, strips, 1, [&](Range mine) {
        Walk alone{walk.worker, 0, true};
        for (int i = mine.begin; i < mine.end; i++) f(Range{begin(i), begin(i + 1)}, alone);
    });
}

// Where prepared rows lie. Strips lie apart by the widest rows, as one may be in another operation than its neighbours.
Plan::Tiles Plan::tiles_of(const Prepared* in, int first_row) const {
    Tiles tiles;
    for (int f = 0; f < NUM_FORMS; f++) tiles.data[f] = in[f].data + (size_t)first_row * in[f].row_bytes;
    return tiles;
}

// Norms (where there is one) and prepares rows in every form that the weights need. `named` null: rows as they come.
// A single tile is prepared by every worker for itself: that takes no longer, and nobody waits for it. One that comes late may
// read rows that are being written again; then no chunk of the product is left to it, and what it prepared is not used.
Plan::Tiles Plan::prepare(const Buffer& in, const float* norm, float eps, const std::vector<Matrix>& weights, Range rows, const int32_t* named, Walk& walk) {
    const int cols = weights[0].cols, full = kernels_->max_tile, tiles = (rows.count() + full - 1) / full;
    bool wanted[NUM_FORMS] = {};
    for (const auto& w : weights) wanted[w.form] = true;
    Worker& worker = workers_[walk.worker];
    const bool apart = tiles == 1 && !walk.alone;
    const Tiles out = apart ? tiles_of(worker.inputs, 0) : tiles_of(inputs_, rows.begin);
    const auto prepare_tiles = [&](Range mine) {
        for (int t = mine.begin; t < mine.end; t++) {
            const int begin = rows.begin + t * full, height = tile_height(rows.end - begin, full), used = std::min(height, rows.end - begin);
            const float* x[MAX_TILE] = {};  // null: a row of padding
            for (int i = 0; i < used; i++) {
                x[i] = in.data + (size_t)(named ? named[begin + i] : begin + i) * in.width;
                if (!norm) continue;
                float* normed = worker.rows + (size_t)i * cols;
                kernels_->rms_norm(x[i], norm, eps, cols, normed);
                x[i] = normed;
            }
            for (int f = 0; f < NUM_FORMS; f++)
                if (wanted[f]) prepare_tile((Form)f, x, cols, out.data[f] + (size_t)t * full * prepared_row_bytes((Form)f, cols), height);
        }
    };
    if (apart) prepare_tiles({0, 1});
    else phase(walk, tiles, chunk_of(tiles, 1), prepare_tiles);  // rows of a tile share cache lines: whole tiles to a worker
    return out;
}

// A tile of rows of `cols` activations; null: a row of padding.
void Plan::prepare_tile(Form form, const float* const* x, int cols, uint8_t* tile, int height) {
    for (int i = 0; i < height; i++) kernels_->prepare_row(form, x[i], cols, tile, height, i);
}

namespace {

// Writes `rows` rows of the `n` outputs of a panel; N is n where it is known, so that the loops vanish.
template <int N> void write_panel(const float* a, int rows, int n, bool add, const float* bias, float* y, int width) {
    if (N) n = N;
    for (int m = 0; m < rows; m++, a += 16, y += width) {
        if (add)
            for (int j = 0; j < n; j++) y[j] += a[j];
        else if (bias)
            for (int j = 0; j < n; j++) y[j] = a[j] + bias[j];
        else
            std::memcpy(y, a, sizeof(float) * n);
    }
}

}  // namespace

void Plan::multiply_panels(const uint8_t* in, const Matrix& w, Range panels, const float* bias, Range rows, Store mode, float* out, int out_width) {
    const int full = kernels_->max_tile;
    const Form form = w.form;
    const size_t row_bytes = prepared_row_bytes(form, w.cols);
    const int rows_in_cache = std::max(1, (int)(CHUNK_BYTES / (row_bytes * full))) * full;
    alignas(64) float acc[MAX_TILE * 16];
    for (int first = rows.begin; first < rows.end; first += rows_in_cache) {
        const int last = std::min(rows.end, first + rows_in_cache);
        for (int p = panels.begin; p < panels.end; p++) {
            const int n = std::min(16, w.rows - p * 16);
            for (int begin = first; begin < last; begin += full) {
                const int height = tile_height(rows.end - begin, full), used = std::min(height, rows.end - begin);
                kernels_->gemm(w, p, in + (size_t)(begin - rows.begin) * row_bytes, height, acc);
                float* y = out + (size_t)begin * out_width + p * 16;
                const float* b = bias ? bias + p * 16 : nullptr;
                if (n == 16) write_panel<16>(acc, used, n, mode == Store::ADD, b, y, out_width);
                else write_panel<0>(acc, used, n, mode == Store::ADD, b, y, out_width);
            }
        }
    }
}

// Matrices side by side: their panels are one range, so that no worker waits between them.
void Plan::multiply(const Tiles& in, const std::vector<Matrix>& weights, const std::vector<const float*>& biases, Range rows, Store mode, float* out, int out_width, Walk& walk) {
    int total = 0;
    for (const auto& w : weights) total += w.panels;
    phase(walk, total, chunk_of(total, 1), [&](Range mine) {
        int base = 0, column = 0;
        for (size_t i = 0; i < weights.size(); i++) {
            const Matrix& w = weights[i];
            const Range panels{std::max(mine.begin - base, 0), std::min(mine.end - base, w.panels)};
            if (panels.begin < panels.end) multiply_panels(in.data[w.form], w, panels, biases.empty() ? nullptr : biases[i], rows, mode, out + column, out_width);
            base += w.panels;
            column += w.rows;
        }
    });
}

// Panels `pairs.begin` · 2 … of gate and up: 32 columns at a time, all that a group of the down matrix's input needs.
void Plan::gate_up(const Tiles& in, const Operation& op, Range pairs, Range rows) {
    const Matrix &gate = op.weights[0], &up = op.weights[1];
    const auto activate = op.gelu ? kernels_->gelu_mul : kernels_->silu_mul;
    const int full = kernels_->max_tile;
    const Form out_form = op.down[0].form;
    uint8_t* hidden = tiles_of(hidden_, rows.begin).data[out_form];
    const size_t gate_row = prepared_row_bytes(gate.form, gate.cols), up_row = prepared_row_bytes(up.form, up.cols);
    const size_t out_row = prepared_row_bytes(out_form, gate.rows);
    const int rows_in_cache = std::max(1, (int)(CHUNK_BYTES / (gate_row * full))) * full;
    alignas(64) float g[MAX_TILE * 16], u[MAX_TILE * 16], h[MAX_TILE][32];
    for (int first = rows.begin; first < rows.end; first += rows_in_cache) {
        const int last = std::min(rows.end, first + rows_in_cache);
        for (int column = pairs.begin * 32; column < std::min(pairs.end * 32, gate.rows); column += 32) {
            const int width = std::min(32, gate.rows - column);
            for (int begin = first; begin < last; begin += full) {
                const int height = tile_height(rows.end - begin, full), used = std::min(height, rows.end - begin);
                const size_t above = begin - rows.begin;
                const float* x[MAX_TILE] = {};
                for (int half = 0; half < width; half += 16) {
                    const int panel = (column + half) / 16;
                    kernels_->gemm(gate, panel, in.data[gate.form] + above * gate_row, height, g);
                    kernels_->gemm(up, panel, in.data[up.form] + above * up_row, height, u);
                    for (int m = 0; m < used; m++) activate(g + m * 16, u + m * 16, h[m] + half);
                }
                for (int m = 0; m < used; m++) x[m] = h[m];
                prepare_tile(out_form, x, width, hidden + above * out_row + prepared_row_bytes(out_form, column) * height, height);
            }
        }
    }
}

// x + product, or x + norm(product).
void Plan::add_to_residual(const Tiles& in, const Operation& op, const std::vector<Matrix>& weights, Range rows, Walk& walk) {
    const Buffer& x = residual(op, op.out);
    if (!op.post_norm) return multiply(in, weights, {}, rows, Store::ADD, x.data, x.width, walk);
    const Buffer& product = buffers_[op.product];
    multiply(in, weights, {}, rows, Store::WRITE, product.data, product.width, walk);
    phase(walk, rows.count(), chunk_of(rows.count(), 1), [&](Range mine) {
        float* normed = workers_[walk.worker].rows;
        for (int r = rows.begin + mine.begin; r < rows.begin + mine.end; r++) {
            kernels_->rms_norm(product.data + (size_t)r * product.width, op.post_norm, op.eps, x.width, normed);
            float* y = x.data + (size_t)r * x.width;
            for (int j = 0; j < x.width; j++) y[j] += normed[j];
        }
    });
}

// Rows × heads (q, then k, then v of each row) in one range.
void Plan::rope_kv(const Operation& op, Range range) {
    const int kv_heads = kv_.num_kv_heads, d = kv_.head_dim, heads = op.num_heads + 2 * kv_heads;
    const Rope& table = ropes_[op.rope];
    const RopeParams rope{op.num_heads, kv_heads, d, table.num_pairs, table.angles, op.q_norm, op.k_norm, op.eps, op.q_scale};
    auto* q = (uint16_t*)buffers_[op.out].data;
    int sequence = 0;
    for (int i = range.begin; i < range.end; i++) {
        const int r = i / heads, h = i % heads;
        while (r >= step_.query_start[sequence + 1]) sequence++;
        const int kind = h < op.num_heads ? 0 : h < op.num_heads + kv_heads ? 1 : 2;
        const int head = kind == 0 ? h : (h - op.num_heads) % kv_heads;
        const float* x = buffers_[op.in].data + (size_t)r * buffers_[op.in].width + (size_t)h * d;
        if (kind == 0) {
            kernels_->rope_head(rope, 0, x, r, q + ((size_t)r * op.num_heads + head) * d, nullptr, 0);
            continue;
        }
        const int position = step_.positions[r], column = op.table * table_columns(step_) + position / kv_.block_size;
        const int block = step_.block_tables[(size_t)sequence * step_.table_stride + column];
        const int place = kind == 1 ? head : kv_heads + head, slot = position % kv_.block_size;
        float* scale = kv_.type == KV_INT8 ? kv_.key_scales(block, op.layer, place) + slot : nullptr;
        kernels_->rope_head(rope, kind, x, r, kv_.keys(block, op.layer, place), scale, slot);
    }
}

void Plan::attend(const Operation& op, Walk& walk) {
    const AttentionPlan& plan = attention_[op.table];
    const AttentionParams params{&kv_, op.layer, op.num_heads, op.table * table_columns(step_), plan.window,
                                 (const uint16_t*)buffers_[op.in].data, buffers_[op.out].data, plan.shared_rows().data(), partials_.data()};
    const auto& items = plan.items();
    const int count = of_wanted(op) && !step_.num_logit_rows ? 0 : (int)items.size();
    const auto wanted = [&](const AttentionItem& item) {
        if (!of_wanted(op) || item.shared || item.fold != NO_FOLD) return true;
        const auto* rows = &is_wanted_[item.row];
        return std::find(rows, rows + item.num_rows, 1) != rows + item.num_rows;
    };
    // The heads of a page lie side by side: where reading binds, a worker that takes them all reads on where the last one ended.
    const bool reading_binds = step_.num_rows < 4 * step_.num_sequences, enough = count >= CHUNKS_PER_WORKER * pool_->size() * kv_.num_kv_heads;
    const int chunk = reading_binds && enough ? kv_.num_kv_heads : 1;
    const auto attend_items = [&](Range mine) {
        for (int i = mine.begin; i < mine.end; i++) {
            const AttentionItem& item = items[i];
            if (!wanted(item)) continue;
            const AttentionItem& next = items[i + 1 < mine.end ? i + 1 : std::max(0, mine.begin - chunk)];  // as it will mostly be
            kernels_->attend(params, item, next, workers_[walk.worker].attention);
            if (item.fold != NO_FOLD) count_part(plan, params, item.fold);
            for (int r = 0; item.shared && r < item.num_rows; r++) count_part(plan, params, plan.shared_rows()[item.row + r].fold);
        }
    };
    phase(walk, count, chunk, attend_items, Order::BACKWARD);  // the last items of a sequence are the longest
}

// Folds what has all its parts: the worker that brought the last one sees what the others wrote.
void Plan::count_part(const AttentionPlan& plan, const AttentionParams& params, int fold) {
    const AttentionFold& parts = plan.folds()[fold];
    if (arrived_[fold].fetch_add(1, std::memory_order_acq_rel) + 1 < parts.num_parts) return;
    arrived_[fold].store(0, std::memory_order_relaxed);
    kernels_->fold_partials(params, parts);
}

void Plan::logits(const Operation& op, Walk& walk) {
    for (int begin = 0; begin < step_.num_logit_rows; begin += logit_tile_) {
        const int n = std::min(logit_tile_, step_.num_logit_rows - begin);
        by_strips({0, n}, walk, [&](Range rows, Walk& own) { logits_of_rows(op, begin, rows, own); });
    }
}

// Of the tile of logits that begins at `first`.
void Plan::logits_of_rows(const Operation& op, int first, Range rows, Walk& walk) {
    const Matrix& w = op.weights[0];
    const Tiles in = of_wanted(op) ? prepare(wanted_, op.norm, op.eps, op.weights, {first + rows.begin, first + rows.end}, nullptr, walk)
                                   : prepare(buffers_[op.in], op.norm, op.eps, op.weights, rows, step_.logit_rows + first, walk);
    multiply(in, op.weights, {}, rows, Store::WRITE, logits_, w.rows, walk);
    phase(walk, rows.count(), 1, [&](Range mine) {
        for (int i = rows.begin + mine.begin; i < rows.begin + mine.end; i++) {
            const float* row = logits_ + (size_t)i * w.rows;
            const int at = first + i;
            if (step_.logits) std::memcpy(step_.logits + (size_t)at * w.rows, row, sizeof(float) * w.rows);
            if (step_.sampling) kernels_->sample_row(row, w.rows, step_.sampling[at], step_.results[at], workers_[walk.worker].sampling);
        }
    });
}

// An operation that works row by row.
void Plan::run_rows(const Operation& op, Range rows, Walk& walk) {
    const auto prepared = [&] { return prepare(residual(op, op.in), op.norm, op.eps, op.weights, rows, nullptr, walk); };
    switch (op.kind) {
        case Kind::EMBED:
            return phase(walk, rows.count(), chunk_of(rows.count(), 1), [&](Range mine) {
                for (int r = rows.begin + mine.begin; r < rows.begin + mine.end; r++) {
                    const int width = buffers_[op.out].width;
                    float* x = buffers_[op.out].data + (size_t)r * width;
                    kernels_->dequantize_row(op.weights[0], step_.token_ids[r], x);
                    if (op.scale != 1.0f)
                        for (int j = 0; j < width; j++) x[j] *= op.scale;
                }
            });
        case Kind::NORM_LINEAR: return multiply(prepared(), op.weights, op.biases, rows, Store::WRITE, buffers_[op.out].data, buffers_[op.out].width, walk);
        case Kind::ROPE_KV_WRITE: {
            const int heads = op.num_heads + 2 * kv_.num_kv_heads, first = rows.begin * heads, count = rows.count() * heads;
            return phase(walk, count, chunk_of(count, 8), [&](Range mine) { rope_kv(op, {first + mine.begin, first + mine.end}); });
        }
        case Kind::LINEAR_RESIDUAL: {
            if (!of_wanted(op)) return add_to_residual(prepared(), op, op.weights, rows, walk);
            const Buffer& x = buffers_[op.out];
            phase(walk, rows.count(), chunk_of(rows.count(), 1), [&](Range mine) {
                for (int r = rows.begin + mine.begin; r < rows.begin + mine.end; r++)
                    std::memcpy(wanted_.data + (size_t)r * x.width, x.data + (size_t)step_.logit_rows[r] * x.width, sizeof(float) * x.width);
            });
            return add_to_residual(prepare(buffers_[op.in], nullptr, 0, op.weights, rows, step_.logit_rows, walk), op, op.weights, rows, walk);
        }
        case Kind::GATED_MLP: {
            const Tiles in = prepared();
            const int pairs = (op.weights[0].panels + 1) / 2;
            phase(walk, pairs, chunk_of(pairs, 1), [&](Range mine) { gate_up(in, op, mine, rows); });
            return add_to_residual(tiles_of(hidden_, rows.begin), op, op.down, rows, walk);
        }
        case Kind::ATTENTION:
        case Kind::LOGITS: break;
    }
}

}  // namespace poise
