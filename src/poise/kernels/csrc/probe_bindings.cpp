// Probes of the machine's limits as Python calls them: timed here, on all workers of a pool.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <stdexcept>

#include "kernels.h"
#include "memory.h"
#include "pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace poise {
Isa isa_of(const std::string& name);
const KernelTable* table_of(const std::string& isa);
namespace {

std::atomic<uint32_t> sink;  // what the probes computed: nothing may be left out

// A working set of its own, written once.
struct ProbeBuffer {
    Mapping memory;
    ProbeBuffer(size_t bytes, bool huge_pages) : memory(bytes, huge_pages) {
        uint32_t state = 1;
        for (size_t i = 0; i + 4 <= bytes; i += 4) *(uint32_t*)(memory.data() + i) = state = state * 1664525u + 1013904223u;
    }
};

template <class F> double seconds_of(Pool& pool, F& task) {
    nb::gil_scoped_release release;
    const auto begin = std::chrono::steady_clock::now();
    pool.run(task);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double read(std::shared_ptr<Pool> pool, const std::string& isa, const ProbeBuffer& buffer, size_t ahead) {
    const KernelTable* kernels = table_of(isa);
    const size_t size = buffer.memory.size() / 256 * 256, slice = (size / pool->size() + 255) / 256 * 256;
    auto task = [&](int worker) {
        const size_t begin = std::min(size, slice * worker), end = std::min(size, begin + slice);
        sink += kernels->probe_read(buffer.memory.data() + begin, end - begin, ahead);
    };
    return seconds_of(*pool, task);
}

double products(std::shared_ptr<Pool> pool, const std::string& isa, const std::string& kind, int64_t rounds) {
    const KernelTable* kernels = table_of(isa);
    const ProductKind wanted = kind == "int8" ? INT8_PRODUCTS : kind == "bf16" ? BF16_PRODUCTS : F32_PRODUCTS;
    if (wanted == F32_PRODUCTS && kind != "f32") throw std::invalid_argument("unknown product " + kind + ": int8, bf16 or f32");
    if (rounds < 1) throw std::invalid_argument("rounds must be positive, not " + std::to_string(rounds));
    alignas(64) uint8_t operands[256];
    for (int i = 0; i < 256; i++) operands[i] = (uint8_t)(i % 2 ? 63 : i);  // finite as bf16 and f32
    std::atomic<int64_t> done{0};
    auto task = [&](int) {
        int64_t operations = 0;
        sink += kernels->probe_products(wanted, rounds, operands, &operations);
        done += operations;
    };
    const double seconds = seconds_of(*pool, task);
    return (double)done / seconds;
}

const char* dot_bf16(const std::string& isa, const std::string& most) {
    static constexpr const char* NAMES[] = {"nowhere", "in products", "everywhere", "where faster"};
    for (int i = 0; i < 4; i++)
        if (most == NAMES[i]) return NAMES[(int)choose_dot_bf16(isa_of(isa), (DotBF16)i)];
    throw std::invalid_argument("unknown use of the bf16 instruction: " + most);
}

}  // namespace

void bind_probes(nb::module_& m) {
    nb::class_<ProbeBuffer>(m, "ProbeBuffer", "Memory of one page size, written once.")
        .def(nb::init<size_t, bool>(), "bytes"_a, "huge_pages"_a)
        .def_prop_ro("nbytes", [](const ProbeBuffer& b) { return b.memory.size() / 256 * 256; });
    m.def("probe_read", &read, "pool"_a, "isa"_a, "buffer"_a, "ahead"_a, "Seconds to read the buffer once, all workers together.");
    m.def("probe_products", &products, "pool"_a, "isa"_a, "kind"_a, "rounds"_a,
          "Multiplications and additions per second of products on registers: kind int8, bf16 or f32, all workers together.");
    m.def("choose_dot_bf16", &dot_bf16, "isa"_a, "most"_a,
          "Uses the instruction for pairs of bf16 nowhere, in products, everywhere, or where faster; returns where it is used now.\n"
          "Bits are the same; no step may run meanwhile.");
}

}  // namespace poise
