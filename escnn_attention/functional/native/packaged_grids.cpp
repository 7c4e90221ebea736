// Attention on a grid in a package that AOTInductor compiles, forward only.

#include "packaged.h"

#define escnn_attention_size NAMED(escnn_attention_size_of_grids)

#include <memory>

#include "grids/attention.h"

// The output (M, B, N, H, C) of all members of Arguments: of those that it fills, and of gradients, there are none.
extern "C" AOTITorchError NAMED(aoti_torch_cpu_packaged_grids)(
        const AtenTensorHandle** tensors, int64_t num_tensors, const int64_t* integers, int64_t num_integers,
        const double* numbers, int64_t num_numbers, const int64_t* shape, int64_t dim, AtenTensorHandle* out) {
    return told([&] {
        Arguments call =
            arguments_of<Arguments>(tensors, num_tensors, integers, num_integers, numbers, num_numbers);
        const int64_t places = call.heads * call.images * call.positions;
        const int64_t rows = call.query_poses * (call.sum_query_poses ? call.num_poses : 1);
        std::unique_ptr<NUMBER[]> sums(new NUMBER[2 * places * rows]);
        call.out = room<NUMBER>({shape, shape + dim}, out);
        call.sums = sums.get();
        if (call.images && run<NUMBER>(call)) throw std::bad_alloc();
    });
}
