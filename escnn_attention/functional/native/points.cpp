// Attention of points to their neighbours, forward and backward: for functional/points/native.py.

#include "points/attention.h"

// NUMBER is the type of all numbers.
extern "C" int escnn_attention(const Arguments* call) {
    return status_of([&] { return run<NUMBER>(*call); });
}
