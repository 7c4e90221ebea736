// Attention on a grid, forward and backward, for functional/grid/native.py.

#include "grids/attention.h"

// NUMBER is the type of all numbers but the gradients of the tables.
extern "C" int escnn_attention(const Arguments* call) {
    return status_of([&] { return run<NUMBER>(*call); });
}
