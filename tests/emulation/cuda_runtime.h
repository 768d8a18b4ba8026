// Stands in for the CUDA Toolkit's header of this name in an emulated build.
#pragma once
#include "cuda_emulation.h"
