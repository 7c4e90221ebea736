// Attention on a grid, forward and backward, for functional/grid/native.py.

#include "grids/attention.h"

// 0, or 1 where there was not enough memory. NUMBER is the type of all numbers but the gradients of the tables.
extern "C" int escnn_attention(const Arguments* call) { return run<NUMBER>(*call); }
