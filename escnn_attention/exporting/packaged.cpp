// A compiled loop in a package of AOTInductor, forward only.
//
// The package calls it through PyTorch's C interface, which changes neither with its version nor with the compiler.
// SOURCE is the file of the loop, LOOP its name, NUMBER the type of its numbers. A package may hold several loops, whose
// functions have different names therefore.

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>
#include <vector>

#define PASTED(name, loop, number) name##_##loop##_##number
#define WITH(name, loop, number) PASTED(name, loop, number)
#define NAMED(name) WITH(name, LOOP, NUMBER)
#define escnn_attention NAMED(escnn_attention_in_package)
#define escnn_attention_size NAMED(escnn_attention_size_in_package)

#include SOURCE

namespace {

struct Refused {};

void must(AOTITorchError error) {
    if (error != AOTI_TORCH_SUCCESS) throw Refused();
}

int32_t type_of(float) { return aoti_torch_dtype_float32(); }
int32_t type_of(double) { return aoti_torch_dtype_float64(); }

// The arguments from the members of the structure in their order: pointers, whole numbers, numbers. All are as wide.
Arguments arguments_of(const AtenTensorHandle** tensors, int64_t num_tensors, const int64_t* integers,
                       int64_t num_integers, const double* numbers, int64_t num_numbers) {
    static_assert(sizeof(void*) == sizeof(int64_t) && sizeof(double) == sizeof(int64_t));
    if ((num_tensors + num_integers + num_numbers) * int64_t(sizeof(int64_t)) != int64_t(sizeof(Arguments)))
        throw Refused();
    std::vector<void*> pointers(num_tensors);
    for (int64_t i = 0; i < num_tensors; i++) {
        bool contiguous = true;
        if (!tensors[i]) continue;
        must(aoti_torch_is_contiguous(*tensors[i], &contiguous));
        if (!contiguous) throw Refused();
        must(aoti_torch_get_data_ptr(*tensors[i], &pointers[i]));
    }
    Arguments call;
    char* to = reinterpret_cast<char*>(&call);
    std::memcpy(to, pointers.data(), num_tensors * sizeof(void*)), to += num_tensors * sizeof(void*);
    std::memcpy(to, integers, num_integers * sizeof(int64_t)), to += num_integers * sizeof(int64_t);
    std::memcpy(to, numbers, num_numbers * sizeof(double));
    uint32_t threads = 1;
    must(torch_get_num_threads(&threads));
    call.threads = threads;
    return call;
}

void attend(Arguments call, const std::vector<int64_t>& shape, AtenTensorHandle* out) {
    std::vector<int64_t> strides(shape.size(), 1);
    for (size_t i = shape.size() - 1; i > 0; i--) strides[i - 1] = strides[i] * shape[i];
    const int32_t device = aoti_torch_device_type_cpu();
    must(aoti_torch_empty_strided(shape.size(), shape.data(), strides.data(), type_of(NUMBER()), device, 0, out));
    must(aoti_torch_get_data_ptr(*out, &call.out));
    const int64_t size = strides[0] * shape[0];
    if (!size) return;
    const int64_t rows = size / call.channels;
    std::fill_n(static_cast<NUMBER*>(call.out), size, NUMBER(0));
    std::unique_ptr<NUMBER[]> sums(new NUMBER[2 * rows * (call.sum_query_poses ? call.query_poses : 1)]);
    call.sums = sums.get();
    if (escnn_attention(&call)) throw std::bad_alloc();
}

}  // namespace

// The output, of this shape, of all members of Arguments; results and gradients are null.
extern "C" AOTITorchError NAMED(aoti_torch_cpu_packaged)(
        const AtenTensorHandle** tensors, int64_t num_tensors, const int64_t* integers, int64_t num_integers,
        const double* numbers, int64_t num_numbers, const int64_t* shape, int64_t dim, AtenTensorHandle* out) {
    try {
        attend(arguments_of(tensors, num_tensors, integers, num_integers, numbers, num_numbers), {shape, shape + dim}, out);
        return AOTI_TORCH_SUCCESS;
    } catch (const Refused&) {
        return AOTI_TORCH_FAILURE;
    } catch (const std::bad_alloc&) {
        return AOTI_TORCH_FAILURE;
    }
}
