// What Python sees of the sampler: the layout of its records, and a call that samples rows one after the other.
// The engine samples inside a step; this call serves tests and tools. It turns FTZ and DAZ on for its duration.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <string>

#include "kernels.h"
#include "pool.h"
#include "sampling.h"

namespace nb = nanobind;

namespace poise {
namespace {

using Logits = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using PhiloxFn = decltype(&baseline::philox_words);

Isa isa_named(const std::string& name) {
    Isa isa = Isa::BASELINE;
    if (name == "avx2") isa = Isa::AVX2;
    else if (name == "avx512") isa = Isa::AVX512;
    else if (name != "baseline") throw nb::value_error(("isa is '" + name + "', expected baseline, avx2 or avx512").c_str());
    if (!kernel_table(isa)) throw nb::value_error(("this machine cannot run " + name).c_str());
    return isa;
}

PhiloxFn philox_of(Isa isa) {
#if defined(POISE_BUILD_X86)
    if (isa == Isa::AVX512) return avx512::philox_words;
    if (isa == Isa::AVX2) return avx2::philox_words;
#endif
    (void)isa;
    return baseline::philox_words;
}

nb::bytes sample_rows(Logits logits, Bytes rows, const std::string& isa) {
    const size_t n = logits.shape(0);
    const int vocab = (int)logits.shape(1);
    if (rows.shape(0) != n * sizeof(SamplingRow)) throw nb::value_error("rows: expected one sampling row per row of logits");
    if ((uintptr_t)rows.data() % alignof(SamplingRow)) throw nb::value_error("rows: not aligned");
    const SampleRowFn sample_row = kernel_table(isa_named(isa))->sample_row;
    const SamplingRow* row = (const SamplingRow*)rows.data();
    for (size_t i = 0; i < n; i++)
        if (row[i].num_logprobs > MAX_TOP_LOGPROBS) throw nb::value_error("num_logprobs is above 20");
    const std::unique_ptr<SamplingResult[]> results(new SamplingResult[n]);
    const std::unique_ptr<uint64_t[]> scratch(new uint64_t[sampling_scratch_bytes(vocab) / 8 + 1]());
    {
        nb::gil_scoped_release release;
        FlushDenormals flush;
        for (size_t i = 0; i < n; i++)
            sample_row(logits.data() + i * (size_t)vocab, vocab, row[i], results[i], scratch.get());
    }
    return nb::bytes((const char*)results.get(), n * sizeof(SamplingResult));
}

// The words of the 16 counters from (block, position, choice, stream), four each.
nb::list philox(uint64_t seed, uint32_t block, uint32_t position, uint32_t choice, uint32_t stream, const std::string& isa) {
    int32_t words[64];
    philox_of(isa_named(isa))(seed, block, position, choice, stream, words);
    nb::list result;
    for (int32_t word : words) result.append((uint32_t)word);
    return result;
}

#define POISE_FIELD(record, name, format) fields.append(nb::make_tuple(#name, offsetof(record, name), format))

// (name, offset, numpy format) of each field.
nb::list sampling_row_fields() {
    nb::list fields;
    POISE_FIELD(SamplingRow, prompt_tokens, "u8");
    POISE_FIELD(SamplingRow, output_tokens, "u8");
    POISE_FIELD(SamplingRow, bias_ids, "u8");
    POISE_FIELD(SamplingRow, bias_values, "u8");
    POISE_FIELD(SamplingRow, allowed_mask, "u8");
    POISE_FIELD(SamplingRow, banned_ids, "u8");
    POISE_FIELD(SamplingRow, draft_probabilities, "u8");
    POISE_FIELD(SamplingRow, seed, "u8");
    POISE_FIELD(SamplingRow, num_prompt_tokens, "i4");
    POISE_FIELD(SamplingRow, num_output_tokens, "i4");
    POISE_FIELD(SamplingRow, num_bias, "i4");
    POISE_FIELD(SamplingRow, num_banned, "i4");
    POISE_FIELD(SamplingRow, temperature, "f4");
    POISE_FIELD(SamplingRow, top_p, "f4");
    POISE_FIELD(SamplingRow, min_p, "f4");
    POISE_FIELD(SamplingRow, repetition_penalty, "f4");
    POISE_FIELD(SamplingRow, frequency_penalty, "f4");
    POISE_FIELD(SamplingRow, presence_penalty, "f4");
    POISE_FIELD(SamplingRow, top_k, "i4");
    POISE_FIELD(SamplingRow, num_logprobs, "i4");
    POISE_FIELD(SamplingRow, target, "i4");
    POISE_FIELD(SamplingRow, position, "u4");
    POISE_FIELD(SamplingRow, choice, "u4");
    POISE_FIELD(SamplingRow, draft, "i4");
    return fields;
}

nb::list sampling_result_fields() {
    nb::list fields;
    POISE_FIELD(SamplingResult, status, "i4");
    POISE_FIELD(SamplingResult, token_id, "i4");
    POISE_FIELD(SamplingResult, logprob, "f4");
    POISE_FIELD(SamplingResult, rank, "i4");
    POISE_FIELD(SamplingResult, num_top, "i4");
    POISE_FIELD(SamplingResult, top_ids, "20i4");
    POISE_FIELD(SamplingResult, top_logprobs, "20f4");
    return fields;
}
static_assert(MAX_TOP_LOGPROBS == 20);
#undef POISE_FIELD

}  // namespace

void bind_sampling(nb::module_& m) {
    m.def("sample_rows", &sample_rows, nb::arg("logits"), nb::arg("rows"), nb::arg("isa"));
    m.def("philox", &philox, nb::arg("seed"), nb::arg("block"), nb::arg("position"), nb::arg("choice"), nb::arg("stream"),
          nb::arg("isa"));
    m.def("sampling_row_fields", &sampling_row_fields);
    m.def("sampling_result_fields", &sampling_result_fields);
    m.attr("SAMPLING_ROW_BYTES") = sizeof(SamplingRow);
    m.attr("SAMPLING_RESULT_BYTES") = sizeof(SamplingResult);
}

}  // namespace poise
