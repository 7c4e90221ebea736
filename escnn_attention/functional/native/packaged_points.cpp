// Attention between points in a package that AOTInductor compiles, forward only.

#include "packaged.h"

#define escnn_attention_size NAMED(escnn_attention_size_of_points)

#include <memory>

#include "points/attention.h"

// The output (M, G * A, H, C) of all members of Arguments: of those that it fills, and of gradients, there are none.
extern "C" AOTITorchError NAMED(aoti_torch_cpu_packaged_points)(
        const AtenTensorHandle** tensors, int64_t num_tensors, const int64_t* integers, int64_t num_integers,
        const double* numbers, int64_t num_numbers, const int64_t* shape, int64_t dim, AtenTensorHandle* out) {
    return told([&] {
        Arguments call =
            arguments_of<Arguments>(tensors, num_tensors, integers, num_integers, numbers, num_numbers);
        const int64_t queries = call.groups * call.group_queries;
        NUMBER* to = room<NUMBER>({shape, shape + dim}, out);
        std::fill_n(to, call.heads * queries * call.num_poses * call.channels, NUMBER(0));
        const int64_t rows = call.num_poses * (call.sum_query_poses ? call.query_poses : 1);
        std::unique_ptr<NUMBER[]> sums(new NUMBER[call.heads * queries * rows * 2]);
        call.out = to, call.sums = sums.get();
        if (!run<NUMBER>(call)) throw std::bad_alloc();
    });
}
