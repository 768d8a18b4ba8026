// The CUDA kernels of the scan as C++ (cuda_emulation.h).
#include "kernels/cuda/ssd.cu"
