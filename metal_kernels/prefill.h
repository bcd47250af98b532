// Shared by the kernels for attention of several tokens of a sequence: their arguments, and the indices of rows.

#include "kv_cache.h"
#include "softmax.h"

// The span of a context whose keys and values are expanded, `[head, position, value]`.
struct Span {
    uint begin;
    uint end;
    uint num_plain;      // values of a query before the rotated ones, which are elsewhere,
    uint rotated_width;  // at the ends of heads of this many values
};

struct FlashAttentionArgs {
    Pages pages;      // of a span: one block for each head
    uint num_heads;
    uint q_stride;    // stride of tokens' queries, in values
    uint window;      // positions that a token attends to, itself included
    float scale;      // of scores, times log2(e)
    Span span;        // of expanded keys and values, if used
    uint num_tokens;  // of the step
    float soft_cap;   // on scores, times log2(e), if there is one
};

// Neighbouring tokens of one sequence.
struct PrefillTile {
    uint first_token;     // index in the step: the row of q and of the result
    uint num_tokens;
    uint first_position;  // of the first token in its sequence
    uint table_start;     // of the sequence's block table
};

constant bool HAS_SPANS [[function_constant(0)]];
constant bool HAS_SINKS [[function_constant(1)]];
constant bool HAS_SOFT_CAP [[function_constant(2)]];

// Values of a query or key and of a value, at most MAX_DIM. As compile-time constants they save divisions and loop
// counters.
constant ushort HEAD_DIM [[function_constant(3)]];
constant ushort VALUE_DIM [[function_constant(4)]];

// The rows of a key and of its value.
inline uint row_of_key(constant FlashAttentionArgs& a, device const uint* block_table, uint kv_head, uint position) {
    if (HAS_SPANS) {
        return kv_head * a.pages.block_size + position - a.span.begin;
    }
    return row_of(a.pages, block_table, kv_head, position);
}

// The row of a result, and of its running maximum and sum between spans.
inline ulong row_of_result(constant FlashAttentionArgs& a, uint token, uint head) {
    return ulong(token) * a.num_heads + head;
}
