// The CUDA kernels of decoding as C++ (cuda_emulation.h).
#include "kernels/cuda/decode_attention.cu"
