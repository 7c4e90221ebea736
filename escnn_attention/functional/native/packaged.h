// What the loops in packages that AOTInductor compiles have in common, forward only: packaged.py has packages link them.
//
// The package calls them through PyTorch's C interface, which changes neither with its version nor with the compiler.

#pragma once

#include <cstring>
#include <new>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>
#include <vector>

// One package may hold loops for both types of numbers, whose functions need names of their own.
#define PASTED(name, number) name##_##number
#define WITH(name, number) PASTED(name, number)
#define NAMED(name) WITH(name, NUMBER)

namespace {

struct Refused {};

void must(AOTITorchError error) {
    if (error != AOTI_TORCH_SUCCESS) throw Refused();
}

// The arguments from the members of the structure in their order: pointers, whole numbers, numbers. All are as wide.
template <class Arguments>
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

int32_t type_of(float) { return aoti_torch_dtype_float32(); }
int32_t type_of(double) { return aoti_torch_dtype_float64(); }

// Room for a tensor that is given back.
template <class T> T* room(const std::vector<int64_t>& shape, AtenTensorHandle* out) {
    std::vector<int64_t> strides(shape.size(), 1);
    for (size_t i = shape.size() - 1; i > 0; i--) strides[i - 1] = strides[i] * shape[i];
    const int32_t device = aoti_torch_device_type_cpu();
    void* to;
    must(aoti_torch_empty_strided(shape.size(), shape.data(), strides.data(), type_of(T()), device, 0, out));
    must(aoti_torch_get_data_ptr(*out, &to));
    return static_cast<T*>(to);
}

// What PyTorch is told of work.
template <class Work> AOTITorchError told(Work work) {
    try {
        work();
        return AOTI_TORCH_SUCCESS;
    } catch (const Refused&) {
        return AOTI_TORCH_FAILURE;
    } catch (const std::bad_alloc&) {
        return AOTI_TORCH_FAILURE;
    }
}

}  // namespace
