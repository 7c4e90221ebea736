// Threads that take tasks.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#if defined(__linux__)
// Of GCC's OpenMP, if PyTorch has loaded it: its threads are awake, and new ones take long to begin.
extern "C" void GOMP_parallel(void (*work)(void*), void* with, unsigned threads, unsigned flags) __attribute__((weak));
#endif

namespace {

// work(worker, task) for tasks 0, 1, ..., in threads that have a worker each. False where there was not enough memory.
template <class Make, class Work> bool share(int64_t tasks, int64_t threads, Make make, Work work) {
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
    const auto loop = [&] {
        try {
            auto worker = make();
            for (int64_t task; (task = next++) < tasks && !failed;) work(worker, task);
        } catch (const std::bad_alloc&) {
            failed = true;
        }
    };
    const int64_t number = std::min(threads, tasks);
#if defined(__linux__)
    if (GOMP_parallel && number > 1) {
        auto call = &loop;
        GOMP_parallel([](void* f) { (**static_cast<decltype(call)*>(f))(); }, &call, unsigned(number), 0);
        return !failed;
    }
#endif
    std::vector<std::thread> others;
    try {
        for (int64_t i = 1; i < number; i++) others.emplace_back(loop);
    } catch (const std::system_error&) {  // No more threads are to be had: those that there are do the work.
    }
    loop();
    for (auto& thread : others) thread.join();
    return !failed;
}

// What a loop returns to Python: 0, or 1 where there was not enough memory. run() is true if there was.
template <class Run> int status_of(Run run) {
    try {
        return !run();
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

}  // namespace
