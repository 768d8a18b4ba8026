#include <gtest/gtest.h>

#include "kernels/cpu/blas.h"

int main(int argc, char** argv) {
    fenwick::kernels::cpu::use_fast_blas(argv);
    testing::InitGoogleTest(&argc, argv);
    return RUN_ALL_TESTS();
}
