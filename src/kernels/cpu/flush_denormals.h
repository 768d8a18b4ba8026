// Denormal numbers read and written as zero, for loops over values that decay without end.
#pragma once

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace fenwick::kernels::cpu {

// While it lives, results of this thread's arithmetic below the smallest normal number become 0, and such operands count
// as 0 (BLAS calls included). A state that decayed so far is 0 for every purpose, and x86 takes a hundred times longer over
// denormal operands. Set it inside the blocks of a parallel_for, so that results do not depend on which thread runs them.
// On other processors it does nothing.
class FlushDenormals {
public:
    FlushDenormals(const FlushDenormals&) = delete;
    FlushDenormals& operator=(const FlushDenormals&) = delete;
#if defined(__SSE2__)
    FlushDenormals() : previous_(_mm_getcsr()) { _mm_setcsr(previous_ | 0x8040u); }  // flush to zero, denormals are zero
    ~FlushDenormals() { _mm_setcsr(previous_); }

private:
    unsigned previous_;
#else
    FlushDenormals() {}
    ~FlushDenormals() {}
#endif
};

}  // namespace fenwick::kernels::cpu
