// For tools that slow a kernel down a thousand times: some of a test's many cases instead of all of them.
#pragma once

#include <cstdlib>

namespace fenwick::test {

// Whether to run the next case: of all that this process asks for, each n-th from the first on, n from FENWICK_CASE_STRIDE
// (without it, every case). An odd n meets all dtypes, which are an even number, in turn.
inline bool sampled() {
    static const int stride = [] {
        const char* const text = std::getenv("FENWICK_CASE_STRIDE");
        return text != nullptr && std::atoi(text) > 0 ? std::atoi(text) : 1;
    }();
    static int asked = 0;
    return asked++ % stride == 0;
}

}  // namespace fenwick::test
