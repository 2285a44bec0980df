// One step as arrays: what a plan is given to run. Plain C++.
#pragma once
#include <cstdint>

#include "sampling.h"

namespace poise {

struct StepArrays {
    const int32_t *token_ids, *positions, *query_start, *block_tables, *logit_rows;  // the tables of a sequence's groups side by side
    int num_rows, num_sequences, table_stride, num_logit_rows;
    const SamplingRow* sampling;  // [num_logit_rows] or null: only the logits are wanted
    SamplingResult* results;
    float* logits;  // [num_logit_rows][vocabulary] or null
};

}  // namespace poise
