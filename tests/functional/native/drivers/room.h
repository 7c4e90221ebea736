// Memory of exactly the size that a call needs, for sanitizers to watch.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <random>
#include <type_traits>
#include <utility>
#include <vector>

// How many numbers are missing everywhere: an error that has to be found.
inline const int64_t missing = std::getenv("MISSING") ? std::atoi(std::getenv("MISSING")) : 0;

class Room {
  public:
    // Zeros.
    template <class T = NUMBER> T* zeros(int64_t size) {
        std::unique_ptr<T[]> numbers(new T[size - missing]());
        T* start = numbers.get();
        keep(std::move(numbers), size - missing);
        return start;
    }
    NUMBER* random(int64_t size) {
        NUMBER* numbers = zeros(size);
        for (int64_t i = 0; i < size - missing; i++) numbers[i] = std::normal_distribution<NUMBER>()(generator);
        return numbers;
    }
    bool is_finite() const {
        for (const auto& [numbers, size] : memory)
            for (int64_t i = 0; i < size; i++)
                if (!std::isfinite(numbers[i])) return false;
        for (const auto& [numbers, size] : tables)
            for (int64_t i = 0; i < size; i++)
                if (!std::isfinite(numbers[i])) return false;
        return true;
    }

  private:
    template <class T> void keep(std::unique_ptr<T[]> numbers, int64_t size) {
        if constexpr (std::is_same_v<T, NUMBER>)
            memory.emplace_back(std::move(numbers), size);
        else if constexpr (std::is_same_v<T, int64_t>)
            whole.push_back(std::move(numbers));
        else
            tables.emplace_back(std::move(numbers), size);
    }

    std::vector<std::pair<std::unique_ptr<NUMBER[]>, int64_t>> memory;
    std::vector<std::pair<std::unique_ptr<double[]>, int64_t>> tables;  // of gradients in double precision
    std::vector<std::unique_ptr<int64_t[]>> whole;
    std::mt19937 generator{0};
};
