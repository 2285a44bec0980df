// The Python face of the native backend: pool, packed matrices, pages, plans.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <cstring>
#include <optional>
#include <stdexcept>

#include "plan.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace poise {
void bind_sampling(nb::module_& m);
void bind_probes(nb::module_& m);
namespace {

template <class T> using Array1 = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T> using Array2 = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Bytes1 = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr const char* ISA_NAMES[] = {"baseline", "avx2", "avx512"};

}  // namespace

Isa isa_of(const std::string& name) {
    for (int i = 0; i < 3; i++)
        if (name == ISA_NAMES[i]) return (Isa)i;
    throw std::invalid_argument("unknown instruction set " + name + ": baseline, avx2 or avx512");
}

const KernelTable* table_of(const std::string& isa) {
    if (const KernelTable* t = kernel_table(isa_of(isa))) return t;
    throw std::invalid_argument("the instruction set " + isa + " is not available here");
}

namespace {

std::vector<std::string> available() {
    std::vector<std::string> names;
    for (int i = 0; i < 3; i++)
        if (kernel_table((Isa)i)) names.push_back(ISA_NAMES[i]);
    return names;
}

Format format_of(const std::string& name) {
    for (int f = 0; f < NUM_FORMATS; f++)
        if (name == FORMATS[f].name) return (Format)f;
    throw std::invalid_argument("no container for tensor type " + name);
}

// Packs a stored matrix, panel by panel, on all workers.
std::shared_ptr<PackedMatrix> pack(std::shared_ptr<Pool> pool, std::shared_ptr<Arena> arena, const std::string& type, Array2<uint8_t> data, int cols,
                                   std::optional<Array1<int32_t>> row_order, const std::string& activations) {
    const Format format = format_of(type);
    if (activations != "int8" && activations != "bf16") throw std::invalid_argument("unknown activations " + activations + ": int8 or bf16");
    const FormatInfo& info = FORMATS[format];
    const int rows = (int)data.shape(0);
    if (cols < 1 || rows < 1 || cols % info.block || data.shape(1) != (size_t)(cols / info.block) * info.block_bytes)
        throw std::invalid_argument("the bytes of a row do not fit " + std::to_string(cols) + " columns of " + type);
    if (row_order && row_order->shape(0) != (size_t)rows) throw std::invalid_argument("row_order has the wrong length");
    for (int r = 0; row_order && r < rows; r++)
        if (row_order->data()[r] < 0 || row_order->data()[r] >= rows) throw std::invalid_argument("row_order points outside the matrix");
    auto packed = std::make_shared<PackedMatrix>();
    const int panels = (rows + 15) / 16;
    const size_t bytes = panel_bytes(format, cols);
    uint8_t* out = arena->allocate(bytes * panels);
    packed->arena = std::move(arena);
    const Form form = info.form == INT8_FORM && activations == "bf16" ? BF16_GROUPS_FORM : info.form;
    packed->matrix = {format, form, rows, cols, panels, bytes, out};
    {
        nb::gil_scoped_release release;
        std::atomic<int> next{0};
        auto task = [&](int) {
            for (int begin; (begin = next.fetch_add(8)) < panels;)
                for (int p = begin; p < std::min(begin + 8, panels); p++) {
                    const uint8_t* stored[16];
                    for (int n = 0; n < 16; n++) {
                        const int r = p * 16 + n;
                        stored[n] = r < rows ? data.data() + (size_t)(row_order ? row_order->data()[r] : r) * data.shape(1) : nullptr;
                    }
                    pack_panel(format, cols, stored, out + bytes * p);
                }
        };
        pool->run(task);
    }
    return packed;
}

// A float32 vector in the arena, padded to whole lanes.
struct Vector {
    std::shared_ptr<Arena> arena;
    const float* data;
    int size;
};

std::shared_ptr<Vector> vector_of(std::shared_ptr<Arena> arena, Array1<float> values) {
    const int n = (int)values.shape(0);
    auto* data = (float*)arena->allocate(sizeof(float) * (n + 16));
    std::memcpy(data, values.data(), sizeof(float) * n);
    return std::make_shared<Vector>(Vector{std::move(arena), data, n});
}

// The pages of a model; see KVLayout.
struct Pages {
    KVLayout layout;
    int num_blocks;
    std::shared_ptr<Mapping> memory;
    Pages(int num_layers, int num_kv_heads, int head_dim, int block_size, int num_blocks_, const std::string& type)
        : layout(layout_of(num_layers, num_kv_heads, head_dim, block_size, type)), num_blocks(num_blocks_),
          memory(std::make_shared<Mapping>(layout.page_bytes * num_blocks)) {
        layout.base = memory->data();
    }
    // The same pages for the layers of another model, which need not fill them.
    Pages(const Pages& shared, int num_layers, int num_kv_heads, int head_dim)
        : layout(layout_of(num_layers, num_kv_heads, head_dim, shared.layout.block_size, shared.layout.type == KV_INT8 ? "int8" : "bf16")),
          num_blocks(shared.num_blocks), memory(shared.memory) {
        if (layout.page_bytes > shared.layout.page_bytes) throw std::invalid_argument("the layers do not fit into a page");
        layout.base = shared.layout.base;
        layout.page_bytes = shared.layout.page_bytes;
    }

  private:
    static KVLayout layout_of(int num_layers, int num_kv_heads, int head_dim, int block_size, const std::string& type) {
        if (head_dim % 16 || head_dim > 1024) throw std::invalid_argument("head_dim " + std::to_string(head_dim) + " is not a multiple of 16 up to 1024");
        if (block_size % 16) throw std::invalid_argument("block_size " + std::to_string(block_size) + " is not a multiple of 16");
        if (type != "bf16" && type != "int8") throw std::invalid_argument("unknown KV type " + type + ": bf16 or int8");
        KVLayout layout{nullptr, 0, num_layers, num_kv_heads, head_dim, block_size, type == "int8" ? KV_INT8 : KV_BF16};
        layout.page_bytes = layout.layer_bytes() * num_layers;
        return layout;
    }
};

struct PlanHandle {
    std::vector<nb::object> owners;  // what the recorded pointers point into
    std::shared_ptr<Pages> pages;
    Plan plan;
    PlanHandle(std::shared_ptr<Pool> pool, const std::string& isa, int max_rows, int logit_tile, std::shared_ptr<Pages> p)
        : pages(p), plan(std::move(pool), table_of(isa), max_rows, logit_tile, p->layout, p->num_blocks) {}
};

const float* pointer(const Vector* v) { return v ? v->data : nullptr; }

void expect(bool ok, const char* what) {
    if (!ok) throw std::invalid_argument(std::string("shapes do not fit: ") + what);
}

// The weight of a norm between a product and the residual x; `product` is the buffer between them.
const float* post_norm_of(PlanHandle& p, nb::object post_norm, int x, int product) {
    if (post_norm.is_none()) return nullptr;
    const Vector& n = nb::cast<Vector&>(post_norm);
    expect(product >= 0 && p.plan.buffer_width(product) == p.plan.buffer_width(x) && n.size == p.plan.buffer_width(x), "post-norm");
    p.owners.push_back(post_norm);
    return n.data;
}

}  // namespace
}  // namespace poise

NB_MODULE(_native, m) {
    using namespace poise;
    m.doc() = "Native CPU backend: packed weights, paged KV, plans replayed by a pool of workers.";
    m.def("available_isas", &available, "Instruction sets that this build holds and this CPU runs, slowest first.");
    m.def("max_tile", [](const std::string& isa) { return table_of(isa)->max_tile; }, "isa"_a, "Rows of a full tile.");
    bind_sampling(m);

    nb::class_<Pool>(m, "Pool").def(nb::init<int>(), "threads"_a).def_prop_ro("threads", &Pool::size);
    bind_probes(m);
    nb::class_<Arena>(m, "Arena").def(nb::init<>()).def_prop_ro("used_bytes", &Arena::used);
    nb::class_<PackedMatrix>(m, "Matrix")
        .def_prop_ro("rows", [](const PackedMatrix& w) { return w.matrix.rows; })
        .def_prop_ro("cols", [](const PackedMatrix& w) { return w.matrix.cols; })
        .def_prop_ro("type", [](const PackedMatrix& w) { return FORMATS[w.matrix.format].name; })
        .def_prop_ro("nbytes", [](const PackedMatrix& w) { return w.matrix.panel_bytes * w.matrix.panels; });
    nb::class_<Vector>(m, "Vector").def_prop_ro("size", [](const Vector& v) { return v.size; });
    m.def("pack", &pack, "pool"_a, "arena"_a, "type"_a, "data"_a, "cols"_a, "row_order"_a.none(), "activations"_a = "int8");
    m.def("vector", &vector_of, "arena"_a, "values"_a);

    nb::class_<Pages>(m, "Pages")
        .def(nb::init<int, int, int, int, int, const std::string&>(), "num_layers"_a, "num_kv_heads"_a, "head_dim"_a, "block_size"_a, "num_blocks"_a, "type"_a = "bf16")
        .def("shared_with", [](const Pages& p, int num_layers, int num_kv_heads, int head_dim) {
            return std::make_shared<Pages>(p, num_layers, num_kv_heads, head_dim);
        }, "num_layers"_a, "num_kv_heads"_a, "head_dim"_a, "The same memory, laid out for the layers of another model.")
        .def_prop_ro("page_bytes", [](const Pages& p) { return p.layout.page_bytes; })
        .def_prop_ro("num_blocks", [](const Pages& p) { return p.num_blocks; })
        .def("fill", [](Pages& p, int block, int byte) {
            if (block < 0 || block >= p.num_blocks) throw std::invalid_argument("no such block");
            std::memset(p.layout.base + (size_t)block * p.layout.page_bytes, byte, p.layout.page_bytes);
        }, "block"_a, "byte"_a, "Fills a page with a byte: tests poison recycled pages so.")
        .def("populate", [](Pages& p, int first, int count) {
            if (first < 0 || count < 0 || first + count > p.num_blocks) throw std::invalid_argument("no such blocks");
            p.memory->populate((size_t)first * p.layout.page_bytes, (size_t)count * p.layout.page_bytes);
        }, "first"_a, "count"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Has the system find memory for these blocks now, not at their first write; changes no content.")
        .def("view", [](nb::handle self) {
            Pages& p = nb::cast<Pages&>(self);
            const size_t shape[2] = {(size_t)p.num_blocks, p.layout.page_bytes};
            return nb::ndarray<nb::numpy, uint8_t, nb::ndim<2>>(p.layout.base, 2, shape, self);
        }, "uint8 [blocks, bytes per page]: the pages themselves.");

    nb::class_<PlanHandle>(m, "Plan")
        .def(nb::init<std::shared_ptr<Pool>, const std::string&, int, int, std::shared_ptr<Pages>>(), "pool"_a, "isa"_a, "max_rows"_a, "logit_tile"_a, "pages"_a)
        .def("buffer", [](PlanHandle& p, int width) { return p.plan.buffer(width); }, "width"_a)
        .def("buffer_view", [](nb::handle self, int index, int rows) {
            PlanHandle& p = nb::cast<PlanHandle&>(self);
            const size_t shape[2] = {(size_t)rows, (size_t)p.plan.buffer_width(index)};
            return nb::ndarray<nb::numpy, float, nb::ndim<2>>(p.plan.buffer_data(index), 2, shape, self);
        }, "index"_a, "rows"_a)
        .def("embed", [](PlanHandle& p, nb::object table, float scale, int out) {
            const Matrix& w = nb::cast<PackedMatrix&>(table).matrix;
            expect(p.plan.buffer_width(out) == w.cols, "embedding and hidden size");
            p.owners.push_back(table);
            p.plan.embed(w, scale, out);
        }, "table"_a, "scale"_a, "out"_a)
        .def("norm_linear", [](PlanHandle& p, int in, nb::object norm, float eps, std::vector<nb::object> weights, std::vector<nb::object> biases, int out) {
            std::vector<Matrix> matrices;
            std::vector<const float*> pointers;
            int width = 0;
            expect(biases.empty() || biases.size() == weights.size(), "one bias per matrix");
            for (size_t i = 0; i < weights.size(); i++) {
                matrices.push_back(nb::cast<PackedMatrix&>(weights[i]).matrix);
                expect(matrices[i].cols == p.plan.buffer_width(in), "matrix and input");
                width += matrices[i].rows;
                p.owners.push_back(weights[i]);
            }
            for (size_t i = 0; i < biases.size(); i++) {
                const Vector* b = biases[i].is_none() ? nullptr : nb::cast<Vector*>(biases[i]);
                expect(!b || b->size == matrices[i].rows, "bias and matrix");
                pointers.push_back(pointer(b));
                p.owners.push_back(biases[i]);
            }
            const Vector& n = nb::cast<Vector&>(norm);
            expect(n.size == p.plan.buffer_width(in) && width == p.plan.buffer_width(out), "norm and output");
            p.owners.push_back(norm);
            p.plan.norm_linear(in, n.data, eps, std::move(matrices), std::move(pointers), out);
        }, "x"_a, "norm"_a, "eps"_a, "weights"_a, "biases"_a, "out"_a)
        .def("rope_kv_write", [](PlanHandle& p, int qkv, nb::object frequencies, int layer, int num_heads, nb::object q_norm, nb::object k_norm, float eps, float q_scale, int out, int table) {
            const KVLayout& kv = p.pages->layout;
            const Vector& f = nb::cast<Vector&>(frequencies);
            const Vector* qn = q_norm.is_none() ? nullptr : nb::cast<Vector*>(q_norm);
            const Vector* kn = k_norm.is_none() ? nullptr : nb::cast<Vector*>(k_norm);
            expect(p.plan.buffer_width(qkv) == (num_heads + 2 * kv.num_kv_heads) * kv.head_dim, "q, k, v and heads");
            expect(p.plan.buffer_width(out) * 2 == num_heads * kv.head_dim, "q and heads");
            expect(2 * f.size <= kv.head_dim && layer >= 0 && layer < kv.num_layers && table >= 0, "rope and layer");
            expect((!qn || qn->size == kv.head_dim) && (!kn || kn->size == kv.head_dim), "q/k norm");
            for (const auto& owner : {frequencies, q_norm, k_norm}) p.owners.push_back(owner);
            p.plan.rope_kv_write(qkv, f.data, f.size, layer, num_heads, pointer(qn), pointer(kn), eps, q_scale, out, table);
        }, "qkv"_a, "inverse_frequencies"_a, "layer"_a, "num_heads"_a, "q_norm"_a.none(), "k_norm"_a.none(), "eps"_a, "q_scale"_a, "out"_a, "table"_a)
        .def("attention", [](PlanHandle& p, int q, int layer, int num_heads, int out, int table, int window) {
            const KVLayout& kv = p.pages->layout;
            expect(num_heads % kv.num_kv_heads == 0 && num_heads / kv.num_kv_heads <= MAX_UNITS, "heads and KV heads");
            expect(p.plan.buffer_width(q) * 2 == num_heads * kv.head_dim && p.plan.buffer_width(out) == num_heads * kv.head_dim, "q and output");
            expect(layer >= 0 && layer < kv.num_layers && table >= 0 && window >= 0, "layer, table and window");
            p.plan.attention(q, layer, num_heads, out, table, window);
        }, "q"_a, "layer"_a, "num_heads"_a, "out"_a, "table"_a, "window"_a)
        .def("linear_residual", [](PlanHandle& p, int in, nb::object weight, int x, nb::object post_norm, float eps, int product) {
            const Matrix& w = nb::cast<PackedMatrix&>(weight).matrix;
            expect(w.cols == p.plan.buffer_width(in) && w.rows == p.plan.buffer_width(x), "matrix, input and residual");
            const float* post = post_norm_of(p, post_norm, x, product);
            p.owners.push_back(weight);
            p.plan.linear_residual(in, w, x, post, eps, product);
        }, "a"_a, "weight"_a, "x"_a, "post_norm"_a.none(), "eps"_a, "product"_a)
        .def("gated_mlp", [](PlanHandle& p, int x, nb::object norm, float eps, nb::object gate, nb::object up, nb::object down, bool gelu,
                             nb::object post_norm, int product) {
            const Matrix &g = nb::cast<PackedMatrix&>(gate).matrix, &u = nb::cast<PackedMatrix&>(up).matrix, &d = nb::cast<PackedMatrix&>(down).matrix;
            const Vector& n = nb::cast<Vector&>(norm);
            const int width = p.plan.buffer_width(x);
            expect(g.rows == u.rows && g.cols == width && u.cols == width && d.rows == width && d.cols == g.rows && n.size == width, "gate, up and down");
            for (const auto& owner : {norm, gate, up, down}) p.owners.push_back(owner);
            const float* post = post_norm_of(p, post_norm, x, product);
            p.plan.gated_mlp(x, n.data, eps, g, u, d, gelu, post, product);
        }, "x"_a, "norm"_a, "eps"_a, "gate"_a, "up"_a, "down"_a, "gelu"_a, "post_norm"_a.none(), "product"_a)
        .def("logits", [](PlanHandle& p, int x, nb::object norm, float eps, nb::object output) {
            const Matrix& w = nb::cast<PackedMatrix&>(output).matrix;
            const Vector& n = nb::cast<Vector&>(norm);
            expect(w.cols == p.plan.buffer_width(x) && n.size == w.cols, "output matrix");
            p.owners.push_back(norm);
            p.owners.push_back(output);
            p.plan.logits(x, n.data, eps, w);
        }, "x"_a, "norm"_a, "eps"_a, "output"_a)
        .def_prop_rw("profiling", [](PlanHandle& p) { return p.plan.profiling(); }, [](PlanHandle& p, bool on) { p.plan.set_profiling(on); },
            "Whether each run stamps its operations.")
        .def_prop_rw("share_prefixes", [](PlanHandle& p) { return p.plan.share_prefixes(); }, [](PlanHandle& p, bool on) { p.plan.set_share_prefixes(on); },
            "Whether attention reads whole splits that lie on the same blocks in several sequences once for all of them.")
        .def_prop_ro("spared_keys", [](PlanHandle& p) { return p.plan.spared_keys(); },
            "By block table: keys that sequences of the last run did not read for themselves, as another one's pass served them.")
        .def_prop_ro("first_of_wanted", [](PlanHandle& p) { return p.plan.first_of_wanted(); },
                     "The first operation that only rows whose logits are asked for go through; the number of operations where there is none.")
        .def_prop_ro("operation_names", [](PlanHandle& p) { return p.plan.operation_names(); })
        .def_prop_ro("operation_times", [](PlanHandle& p) { return p.plan.times(); },
            "Monotonic ns before the first operation of the last profiled run, then behind each one.")
        .def_prop_ro("worker_waits", [](PlanHandle& p) { return p.plan.waits(); }, "ns that each worker of the last profiled run waited for the others.")
        .def("run", [](PlanHandle& p, Array1<int32_t> token_ids, Array1<int32_t> positions, Array1<int32_t> query_start, Array2<int32_t> block_tables,
                       Array1<int32_t> logit_rows, std::optional<Bytes1> sampling, std::optional<Bytes1> results,
                       std::optional<nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>> logits) {
            StepArrays step{};
            step.num_rows = (int)token_ids.shape(0);
            step.num_sequences = (int)query_start.shape(0) - 1;
            step.num_logit_rows = (int)logit_rows.shape(0);
            expect(positions.shape(0) == token_ids.shape(0) && step.num_sequences >= 1 && block_tables.shape(0) == (size_t)step.num_sequences, "step arrays");
            expect(!sampling || (results && sampling->shape(0) >= sizeof(SamplingRow) * step.num_logit_rows && results->shape(0) >= sizeof(SamplingResult) * step.num_logit_rows),
                   "sampling rows");
            expect(!logits || (logits->shape(0) >= (size_t)step.num_logit_rows && logits->shape(1) == (size_t)p.plan.vocabulary()), "logits");
            step.token_ids = token_ids.data();
            step.positions = positions.data();
            step.query_start = query_start.data();
            step.block_tables = block_tables.data();
            step.table_stride = (int)block_tables.shape(1);
            step.logit_rows = logit_rows.data();
            step.sampling = sampling ? (const SamplingRow*)sampling->data() : nullptr;
            step.results = results ? (SamplingResult*)results->data() : nullptr;
            step.logits = logits ? logits->data() : nullptr;
            nb::gil_scoped_release release;
            p.plan.run(step);
        }, "token_ids"_a, "positions"_a, "query_start"_a, "block_tables"_a, "logit_rows"_a, "sampling"_a.none(), "results"_a.none(), "logits"_a.none() = nb::none());
}
