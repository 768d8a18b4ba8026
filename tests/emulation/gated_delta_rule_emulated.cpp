// The CUDA kernels of the gated delta rule as C++ (cuda_emulation.h).
#include "kernels/cuda/gated_delta_rule.cu"
