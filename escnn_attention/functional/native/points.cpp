// Attention of points to their neighbours, forward and backward: for functional/points/native.py.

#include "points/attention.h"

// 0, or 1 where there was not enough memory. NUMBER is the type of all numbers.
extern "C" int escnn_attention(const Arguments* call) {
    try {
        return !run<NUMBER>(*call);
    } catch (const std::bad_alloc&) {
        return 1;
    }
}
