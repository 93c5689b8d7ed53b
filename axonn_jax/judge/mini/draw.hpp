// Random inputs, and comparisons, of the problems' drivers.
#pragma once
#include <random>

using Random = std::mt19937_64;

inline double uniform(Random &random, double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(random);
}

inline int whole(Random &random, int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); }

inline bool near(double got, double wanted) { return std::abs(got - wanted) <= 1e-9 * (1 + std::abs(wanted)); }

inline bool near(std::vector<double> const &got, std::vector<double> const &wanted) {
    if (got.size() != wanted.size()) return false;
    for (size_t i = 0; i < got.size(); i += 1) {
        if (!near(got[i], wanted[i])) return false;
    }
    return true;
}
